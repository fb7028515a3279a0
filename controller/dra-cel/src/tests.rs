//! Selectors judged as Kubernetes judges them.
//!
//! The cases restate those of `k8s.io/dynamic-resource-allocation` v0.37.2
//! (`cel/compile_test.go`) as (expression, device, outcome); their names are
//! kept close to the originals.

use rstest::rstest;

use crate::{AttributeValue, CompileError, DeviceFacts, EvaluationError, Quantity, Selector};

const DRIVER: &str = "dra.example.com";

fn version(text: &str) -> AttributeValue {
    AttributeValue::Version(text.parse().unwrap())
}

fn strings(items: &[&str]) -> AttributeValue {
    AttributeValue::Strings(items.iter().map(|s| (*s).to_owned()).collect())
}

fn versions(items: &[&str]) -> AttributeValue {
    AttributeValue::Versions(items.iter().map(|s| s.parse().unwrap()).collect())
}

fn device_with(
    driver: &str,
    attributes: &[(&str, AttributeValue)],
    capacity: &[(&str, &str)],
) -> DeviceFacts {
    DeviceFacts::new(
        driver,
        false,
        attributes.iter().map(|(name, value)| (*name, value)),
        capacity
            .iter()
            .map(|(name, value)| (*name, value.parse::<Quantity>().unwrap())),
    )
}

fn judge(expression: &str, device: &DeviceFacts) -> Result<bool, EvaluationError> {
    Selector::compile(expression).unwrap().matches(device)
}

fn attribute(expression: &str, value: AttributeValue) -> Result<bool, EvaluationError> {
    judge(expression, &device_with(DRIVER, &[("name", value)], &[]))
}

#[rstest]
#[case::true_("true", true)]
#[case::false_("false", false)]
#[case::domain_check_negative(r#""no-such-domain" in device.attributes"#, false)]
#[case::domain_check_positive(r#""dra.example.com" in device.attributes"#, true)]
#[case::real_driver_name(r#"device.driver == "dra.example.com""#, true)]
#[case::driver_name_qualifier(r#"device.attributes["dra.example.com"].bool"#, true)]
#[case::driver_name_qualifier_map_lookup(r#"device.attributes["dra.example.com"]["bool"]"#, true)]
#[case::bind(
    r#"cel.bind(dra, device.attributes["dra.example.com"], dra.bool)"#,
    true
)]
#[case::bind_twice(
    r#"cel.bind(a, device.attributes["dra.example.com"], cel.bind(b, a.int, b == 1 && a.bool))"#,
    true
)]
#[case::qualified_attribute_name(r#"device.attributes["other.example.com"].name"#, true)]
#[case::int(r#"device.attributes["dra.example.com"].int > 0"#, true)]
#[case::string(r#"device.attributes["dra.example.com"].string == "fish""#, true)]
#[case::version(
    r#"device.attributes["dra.example.com"].version.isGreaterThan(semver("0.0.1"))"#,
    true
)]
#[case::version_v(
    r#"device.attributes["dra.example.com"].version.isGreaterThan(semver("v0.0.1", true)) && isSemver("v1.0.0", true)"#,
    true
)]
#[case::version_compare(
    r#"device.attributes["dra.example.com"].version.compareTo(semver("1.0.0")) == 0"#,
    true
)]
#[case::version_equality(
    r#"device.attributes["dra.example.com"].version == semver("1.0.0")"#,
    true
)]
#[case::quantity(
    r#"device.capacity["dra.example.com"].quantity.isGreaterThan(quantity("1Ki"))"#,
    true
)]
#[case::quantity_compare(
    r#"device.capacity["dra.example.com"].quantity.compareTo(quantity("1Gi")) < 0"#,
    true
)]
#[case::quantity_equality(
    r#"device.capacity["dra.example.com"].quantity == quantity("1024Ki")"#,
    true
)]
#[case::check_positive(
    r#""quantity" in device.capacity["dra.example.com"] && device.capacity["dra.example.com"].quantity.isGreaterThan(quantity("1Ki"))"#,
    true
)]
#[case::check_negative(
    r#"!("name" in device.capacity["dra.example.com"]) || device.capacity["dra.example.com"].name.isGreaterThan(quantity("1Ki"))"#,
    true
)]
#[case::unknown_capacity_domain(r#""memory" in device.capacity["no-such-domain"]"#, false)]
#[case::all(
    r#"
device.capacity["dra.example.com"].quantity.isGreaterThan(quantity("1Ki")) &&
device.attributes["dra.example.com"].bool &&
device.attributes["dra.example.com"].int > 0 &&
device.attributes["dra.example.com"].string == "fish" &&
device.attributes["dra.example.com"].version.isGreaterThan(semver("0.0.1")) &&
device.capacity["dra.example.com"]["quantity"].isGreaterThan(quantity("1Ki")) &&
device.attributes["dra.example.com"]["bool"]
"#,
    true
)]
#[case::check_attribute_domains(r#"device.attributes.exists_one(x, x == "dra.example.com")"#, true)]
#[case::check_attribute_ids(
    r#"device.attributes["dra.example.com"].exists_one(x, x == "string")"#,
    true
)]
#[case::check_capacity_domains(r#"device.capacity.exists_one(x, x == "dra.example.com")"#, true)]
#[case::check_capacity_ids(
    r#"device.capacity["dra.example.com"].exists_one(x, x == "quantity")"#,
    true
)]
#[case::split_attribute(
    r#"device.attributes["dra.example.com"].services.split("example").size() >= 2"#,
    true
)]
#[case::regexp_attribute(
    r#"device.attributes["dra.example.com"].services.matches("[^a]?_ex")"#,
    true
)]
#[case::lower_ascii(
    r#"device.attributes["dra.example.com"].services.lowerAscii().contains("example")"#,
    true
)]
#[case::find(r#""abc 123".find("[0-9]+") == "123""#, true)]
#[case::find_all(r#""1 2 3".findAll("[0-9]", 2).size() == 2"#, true)]
#[case::has_positive(r#"has(device.attributes["dra.example.com"].bool)"#, true)]
#[case::has_negative(r#"has(device.attributes["dra.example.com"].nothing)"#, false)]
#[case::optional_present(r#"device.attributes["dra.example.com"].?bool.orValue(false)"#, true)]
#[case::optional_absent(
    r#"device.attributes["dra.example.com"].?nothing.orValue(false)"#,
    false
)]
#[case::optional_in_unknown_domain(r#"device.attributes["no-such-domain"].?x.orValue(true)"#, true)]
#[case::in_list_literal(
    r#"device.attributes["dra.example.com"].string in ["fish", "bird"]"#,
    true
)]
#[case::allow_multiple_allocations(r#"device.allowMultipleAllocations == false"#, true)]
#[case::error_absorbed_by_or(r#"device.attributes["x"].nothing == 1 || true"#, true)]
#[case::error_absorbed_by_and(r#"device.attributes["x"].nothing == 1 && false"#, false)]
#[case::sets(r#"sets.contains([1, 2, 3], [2]) && !sets.intersects([1], [2])"#, true)]
#[case::lists(r#"[1, 3].sum() == 4 && [3, 1].min() == 1 && [1, 2].isSorted()"#, true)]
#[case::list_index(
    r#"["a", "b"].indexOf("b") == 1 && ["a"].lastIndexOf("z") == -1"#,
    true
)]
#[case::quantity_arithmetic(
    r#"quantity("50k").add(20).sub(quantity("100k")).sub(-50000) == quantity("20")"#,
    true
)]
#[case::quantity_scalars(
    r#"quantity("50k").asInteger() == 50000 && quantity("-1").sign() == -1"#,
    true
)]
#[case::list_range("lists.range(3) == [0, 1, 2]", true)]
#[case::quoting(r#"strings.quote("a").size() == 3"#, true)]
#[case::attributes_equal_themselves("device.attributes == device.attributes", true)]
#[case::values_of_other_types_are_unequal(
    r#"device.attributes["dra.example.com"].int == device.attributes["dra.example.com"].string"#,
    false
)]
#[case::has_in_an_unknown_domain("has(device.attributes.nope)", true)]
#[case::map_and_filter(r#"[1, 2, 3].map(x, x * 2).filter(x, x > 2) == [4, 6]"#, true)]
fn a_selector_judges_as_kubernetes_does(#[case] expression: &str, #[case] expected: bool) {
    let device = device_with(
        DRIVER,
        &[
            ("bool", true.into()),
            ("int", 1.into()),
            ("string", "fish".into()),
            ("version", version("1.0.0")),
            ("services", "some_example_value".into()),
            ("other.example.com/name", true.into()),
        ],
        &[("quantity", "1Mi")],
    );
    assert_eq!(judge(expression, &device), Ok(expected));
}

#[test]
fn a_device_without_driver_name_has_an_empty_one() {
    assert_eq!(
        judge(r#"device.driver == """#, &device_with("", &[], &[])),
        Ok(true)
    );
}

#[test]
fn a_device_that_allows_multiple_allocations_says_so() {
    let device = DeviceFacts::new(DRIVER, true, [], []);
    assert_eq!(judge("device.allowMultipleAllocations", &device), Ok(true));
}

#[rstest]
#[case::string_scalar(strings(&["fish", "bird"]), r#"includes("fish")"#, true)]
#[case::string_list_negative(strings(&["fish", "bird"]), r#"includes("cat")"#, false)]
#[case::string_scalar_positive("fish".into(), r#"includes("fish")"#, true)]
#[case::string_scalar_negative("fish".into(), r#"includes("bird")"#, false)]
#[case::bool_scalar_positive(true.into(), "includes(true)", true)]
#[case::bool_scalar_negative(false.into(), "includes(true)", false)]
#[case::bool_list_positive(AttributeValue::Bools(vec![true, false]), "includes(true)", true)]
#[case::bool_list_negative(AttributeValue::Bools(vec![true, true]), "includes(false)", false)]
#[case::int_scalar_positive(1.into(), "includes(1)", true)]
#[case::int_scalar_negative(2.into(), "includes(1)", false)]
#[case::int_list_positive(AttributeValue::Ints(vec![1, 2]), "includes(1)", true)]
#[case::int_list_negative(AttributeValue::Ints(vec![1, 2]), "includes(3)", false)]
#[case::semver_scalar_positive(version("1.0.0"), r#"includes(semver("1.0.0"))"#, true)]
#[case::semver_scalar_negative(version("1.0.0"), r#"includes(semver("2.0.0"))"#, false)]
#[case::semver_list_positive(versions(&["1.0.0", "2.0.0"]), r#"includes(semver("1.0.0"))"#, true)]
#[case::semver_list_negative(versions(&["1.0.0", "2.0.0"]), r#"includes(semver("3.0.0"))"#, false)]
#[case::list_size(versions(&["1.0.0", "2.0.0"]), "size() == 2", true)]
#[case::macro_on_list_of_int(AttributeValue::Ints(vec![1, 2]), "exists(x, x > 1)", true)]
#[case::macro_on_list_of_string(strings(&["fish", "bird"]), r#"all(x, x != "")"#, true)]
#[case::macro_on_list_of_semver(
    versions(&["1.0.0", "2.0.0"]),
    r#"all(x, x.isGreaterThan(semver("0.0.1")))"#,
    true
)]
fn list_attributes_and_includes_work(
    #[case] value: AttributeValue,
    #[case] call: &str,
    #[case] expected: bool,
) {
    let expression = format!(r#"device.attributes["dra.example.com"].name.{call}"#);
    assert_eq!(attribute(&expression, value), Ok(expected));
}

#[test]
fn the_in_operator_searches_a_list_attribute() {
    let expression = r#"2 in device.attributes["dra.example.com"].name"#;
    assert_eq!(
        attribute(expression, AttributeValue::Ints(vec![1, 2, 3])),
        Ok(true)
    );
}

#[rstest]
#[case::lookup_identifier(
    r#"device.attributes["no-such-domain"].noSuchAttr.isGreaterThan(quantity("0"))"#,
    EvaluationError::NoSuchKey("noSuchAttr".to_owned())
)]
#[case::lookup_map(
    r#"device.attributes["no-such-domain"]["noSuchAttr"].isGreaterThan(quantity("0"))"#,
    EvaluationError::NoSuchKey("noSuchAttr".to_owned())
)]
#[case::list_result(
    r#"device.attributes["dra.example.com"].name"#,
    EvaluationError::NotBool("list".to_owned())
)]
fn an_error_is_an_error_and_not_a_mismatch(
    #[case] expression: &str,
    #[case] expected: EvaluationError,
) {
    assert_eq!(
        attribute(expression, strings(&["fish", "bird"])),
        Err(expected)
    );
}

#[rstest]
#[case::int(1.into())]
#[case::bool(true.into())]
#[case::string("fish".into())]
#[case::version(version("1.0.0"))]
fn a_macro_over_a_scalar_is_an_error(#[case] value: AttributeValue) {
    let error = attribute(
        r#"device.attributes["dra.example.com"].name.exists(x, x == x)"#,
        value,
    );
    assert!(matches!(error, Err(EvaluationError::Runtime(m)) if m.contains("iterable")));
}

#[rstest]
#[case::version_against_text(r#"device.attributes["dra.example.com"].version == "1.0.0""#)]
#[case::quantity_against_text(
    r#"quantity("1").add(1) != device.attributes["dra.example.com"].name"#
)]
#[case::wrong_operand(
    r#"device.attributes["dra.example.com"].name.isGreaterThan(semver("1.0.0"))"#
)]
#[case::bad_quantity(
    r#"device.attributes["dra.example.com"].name == 1 || quantity("3Q") == quantity("1")"#
)]
fn a_type_error_is_an_error(#[case] expression: &str) {
    let attributes = [("name", "fish".into()), ("version", version("1.0.0"))];
    let result = judge(expression, &device_with(DRIVER, &attributes, &[]));
    assert!(
        matches!(result, Err(EvaluationError::Runtime(_))),
        "{result:?}"
    );
}

#[rstest]
#[case::driver_against_number("device.driver == 1")]
#[case::mixed_list(r#"device.driver in ["fish", 1]"#)]
fn operands_of_different_types_are_refused(#[case] expression: &str) {
    let error = Selector::compile(expression).unwrap_err();
    assert!(matches!(error, CompileError::Types { .. }), "{error}");
}

#[rstest]
#[case::syntax("?!")]
#[case::unfinished("device.driver == ")]
#[case::empty("")]
fn what_is_no_cel_is_a_syntax_error(#[case] expression: &str) {
    assert!(matches!(
        Selector::compile(expression),
        Err(CompileError::Syntax(_))
    ));
}

#[rstest]
#[case::int("1", "int")]
#[case::text(r#""true""#, "string")]
#[case::driver("device.driver", "string")]
#[case::size("device.attributes.size()", "int")]
fn a_result_that_is_certainly_no_bool_is_refused(#[case] source: &str, #[case] found: &str) {
    let error = Selector::compile(source).unwrap_err();
    assert!(
        matches!(error, CompileError::NotBool { found: f } if f == found),
        "{error}"
    );
}

#[rstest]
#[case::variable("devices.driver == 'x'", "devices")]
#[case::field("device.atributes['x'].y", "device.atributes")]
#[case::function("device.driver.startWith('x')", "startWith")]
#[case::metering_is_out_of_reach("meter(1, 2) == 1", "meter")]
fn an_unknown_name_is_refused_and_named(#[case] source: &str, #[case] name: &str) {
    assert_eq!(
        Selector::compile(source).unwrap_err(),
        CompileError::Undeclared(name.to_owned())
    );
}

#[test]
fn a_function_that_only_kubernetes_has_is_refused_by_name() {
    let error = Selector::compile("isURL('https://x')").unwrap_err();
    assert_eq!(error, CompileError::Unsupported("isURL".to_owned()));
}

#[test]
fn a_regular_expression_that_does_not_compile_is_refused() {
    let error = Selector::compile("device.driver.matches('[')").unwrap_err();
    assert!(matches!(error, CompileError::Regex(_)));
}

#[test]
fn an_expression_above_10_kibibytes_is_refused() {
    let long = format!("device.driver == '{}'", "x".repeat(10 * 1024));
    assert_eq!(
        Selector::compile(&long).unwrap_err(),
        CompileError::TooLong(long.len())
    );
}

#[rstest]
#[case::nested_loops(&nested_loops())]
#[case::error_swallowed(&format!("{} || true", nested_loops()))]
#[case::doubling_text(&growing("a + a", "a.size() > 0"))]
#[case::doubling_lists(&growing("[a, a, a, a, a, a, a, a]", "size(a) > 0"))]
#[case::doubling_maps(&growing("{'s': a, 't': a, 'u': a, 'v': a, 'w': a, 'x': a, 'y': a}", "size(a) > 0"))]
#[case::replacing(&growing("a.replace('x', a)", "a.size() > 0"))]
#[case::a_variable_named_as_a_namespace(&growing_as(
    "lists",
    "[lists, lists, lists, lists, lists, lists, lists, lists]",
    "size(lists) > 0"
))]
#[case::mapping(&growing("[1, 2, 3, 4, 5, 6, 7, 8].map(i, a)", "size(a) > 0"))]
fn a_costly_selector_stops_at_the_limit(#[case] expression: &str) {
    let result = judge(expression, &device_with(DRIVER, &[], &[]));
    assert_eq!(result, Err(EvaluationError::CostLimit));
}

fn nested_loops() -> String {
    let ten = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]";
    let loops: String = (0..7).map(|i| format!("{ten}.all(x{i}, ")).collect();
    format!("{loops}int('1'.find('[0-9]*')) < 100{}", ")".repeat(7))
}

fn growing(step: &str, end: &str) -> String {
    growing_as("a", step, end)
}

/// Binds a value that grows 8 times.
fn growing_as(variable: &str, step: &str, end: &str) -> String {
    let mut expression = end.to_owned();
    for _ in 0..8 {
        expression = format!("cel.bind({variable}, {step}, {expression})");
    }
    format!("cel.bind({variable}, '{}', {expression})", "x".repeat(64))
}

#[test]
fn deep_nesting_is_refused_and_does_not_overflow_the_stack() {
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("!(", ")"),
        ("-(", ")"),
        ("size(", ")"),
    ] {
        let source = format!("{}true{}", open.repeat(1600), close.repeat(1600));
        assert!(Selector::compile(&source).is_err(), "{open}");
    }
    let sum = format!("1 {} == 1", "+ 1".repeat(1000));
    assert!(matches!(
        Selector::compile(&sum),
        Err(CompileError::TooDeep { .. })
    ));
    let chain = format!("true{}", " && true".repeat(1000));
    assert_eq!(judge(&chain, &device_with(DRIVER, &[], &[])), Ok(true));
}

#[test]
fn a_budget_is_fresh_for_every_evaluation() {
    let selector = Selector::compile("[1, 2, 3].all(x, [1, 2, 3].all(y, x * y > 0))").unwrap();
    let device = device_with(DRIVER, &[], &[]);
    for _ in 0..1000 {
        assert_eq!(selector.matches(&device), Ok(true));
    }
}
