//! The functions that Kubernetes adds to CEL for device selectors.
//!
//! Present: optionals, `cel.bind`, strings, lists, sets, regular expressions,
//! quantities, versions, `includes`. Absent, and refused by name when an
//! expression is compiled: see [`UNSUPPORTED`].

#![allow(
    elided_lifetimes_in_paths,
    reason = "the overload macros take bare type names"
)]

use std::cmp::Ordering;
use std::sync::{Arc, LazyLock};

use cel::common::ast::{ComprehensionExpr, Expr, ListExpr, LiteralValue};
use cel::common::types::{
    CelBool, CelDouble, CelInt, CelList, CelString, DYN_TYPE, INT_TYPE, LIST_TYPE,
};
use cel::common::value::{CowVal, Val};
use cel::parser::Macro;
use cel::{DeclarationError, Env, ExecutionError, add_member_overload, add_overload, extensions};
use regex::Regex;

use crate::meter;
use crate::values::{QuantityVal, SemverVal};
use crate::{Quantity, Version};

/// Functions of the Kubernetes environment that this crate does not have.
pub(crate) const UNSUPPORTED: &[&str] = &[
    "url",
    "isURL",
    "getScheme",
    "getHost",
    "getHostname",
    "getPort",
    "getEscapedPath",
    "getQuery",
    "ip",
    "isIP",
    "isCanonical",
    "cidr",
    "isCIDR",
    "containsIP",
    "containsCIDR",
    "prefixLength",
    "masked",
    "family",
    "isUnspecified",
    "isLoopback",
    "isLinkLocalMulticast",
    "isLinkLocalUnicast",
    "isGlobalUnicast",
    "format.named",
    "named",
    "validate",
    "authorizer",
    "transformList",
    "transformMap",
    "transformMapEntry",
    "fieldSelector",
    "labelSelector",
];

/// Equality as Kubernetes has it; `@` keeps the names out of reach of any source.
pub(crate) const EQUALS: &str = "@equals";
/// The opposite of [`EQUALS`].
pub(crate) const NOT_EQUALS: &str = "@not_equals";

/// The environment, built once.
pub(crate) static ENVIRONMENT: LazyLock<Result<Arc<Env>, DeclarationError>> =
    LazyLock::new(|| environment().map(Arc::new));

fn environment() -> Result<Env, DeclarationError> {
    let mut env = Env::stdlib();
    env.add_extension(extensions::strings)?;
    env.add_extension(extensions::lists)?;
    env.add_macro(bind())?;
    env.add_overload(
        meter::FUNCTION,
        meter::FUNCTION,
        vec![DYN_TYPE, INT_TYPE],
        meter::charge,
    )?;
    let any_two = || vec![DYN_TYPE, DYN_TYPE];
    env.add_overload(EQUALS, EQUALS, any_two(), |args| {
        Ok(truth(equal("_==_", &args)?))
    })?;
    env.add_overload(NOT_EQUALS, NOT_EQUALS, any_two(), |args| {
        Ok(truth(!equal("_!=_", &args)?))
    })?;
    quantities(&mut env)?;
    versions(&mut env)?;
    lists(&mut env)?;
    add_member_overload!(env, fn find: (CelString, CelString) -> Result<CelString>)?;
    add_member_overload!(env, fn find_all: (CelString, CelString) -> Result<CelList>)?;
    add_member_overload!(env, fn find_some: (CelString, CelString, CelInt) -> Result<CelList>,
        name = "findAll")?;
    Ok(env)
}

/// `cel.bind(name, value, expression)`: a loop over nothing whose accumulator is
/// the variable, as in the CEL reference implementation.
fn bind() -> Macro {
    Macro::receiver("bind", 3, |helper, target, args| {
        let on_cel = matches!(target, Some(t) if matches!(&t.expr, Expr::Ident(n) if n == "cel"));
        if !on_cel || args.len() != 3 {
            return Ok(None);
        }
        let Expr::Ident(name) = args[0].expr.clone() else {
            return Err(helper.new_error(args[0].id, "cel.bind() needs a variable's name first"));
        };
        let (Some(result), Some(value)) = (args.pop(), args.pop()) else {
            return Ok(None);
        };
        let expansion = ComprehensionExpr {
            iter_range: helper.next_expr(Expr::List(ListExpr::new(Vec::new()))),
            iter_var: "#unused".to_owned(),
            iter_var2: None,
            loop_cond: helper.next_expr(Expr::Literal(LiteralValue::Boolean(false.into()))),
            loop_step: helper.next_expr(Expr::Ident(name.clone())),
            accu_var: name,
            accu_init: value,
            result,
        };
        Ok(Some(
            helper.next_expr(Expr::Comprehension(Box::new(expansion))),
        ))
    })
}

fn quantities(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn quantity: (CelString) -> Result<QuantityVal>)?;
    add_overload!(env, fn is_quantity: (CelString) -> CelBool)?;
    add_member_overload!(env, fn q_compare: (QuantityVal, QuantityVal) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn q_greater: (QuantityVal, QuantityVal) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn q_less: (QuantityVal, QuantityVal) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn q_sign: (QuantityVal) -> CelInt, name = "sign")?;
    add_member_overload!(env, fn is_integer: (QuantityVal) -> CelBool)?;
    add_member_overload!(env, fn as_integer: (QuantityVal) -> Result<CelInt>)?;
    add_member_overload!(env, fn as_approximate_float: (QuantityVal) -> CelDouble)?;
    add_member_overload!(env, fn q_add: (QuantityVal, QuantityVal) -> Result<QuantityVal>, name = "add")?;
    add_member_overload!(env, fn q_add_int: (QuantityVal, CelInt) -> Result<QuantityVal>, name = "add")?;
    add_member_overload!(env, fn q_sub: (QuantityVal, QuantityVal) -> Result<QuantityVal>, name = "sub")?;
    add_member_overload!(env, fn q_sub_int: (QuantityVal, CelInt) -> Result<QuantityVal>, name = "sub")
}

/// Equality of any two values; a quantity or a version compared with something
/// else is an error, as in Kubernetes, and not "unequal".
fn equal(operator: &str, args: &[CowVal<'_, '_>]) -> Result<bool, ExecutionError> {
    let [left, right] = args else {
        return Err(ExecutionError::invalid_argument_count(2, args.len()));
    };
    let strict =
        left.downcast_ref::<QuantityVal>().is_some() || left.downcast_ref::<SemverVal>().is_some();
    let names = || {
        [left, right]
            .map(|v| v.get_type().name().to_owned())
            .to_vec()
    };
    if strict && left.get_type().name() != right.get_type().name() {
        return Err(ExecutionError::no_such_overload(operator, names()));
    }
    Ok(left.equals(right.as_ref()))
}

fn ordering(ordering: Ordering) -> CelInt {
    CelInt::from(ordering as i64)
}

fn quantity(text: &CelString<'_>) -> Result<QuantityVal, ExecutionError> {
    let parsed: Result<Quantity, _> = text.inner().parse();
    parsed
        .map(QuantityVal)
        .map_err(|e| ExecutionError::function_error("quantity", e))
}

fn is_quantity(text: &CelString<'_>) -> CelBool {
    text.inner().parse::<Quantity>().is_ok().into()
}

fn q_compare(a: &QuantityVal, b: &QuantityVal) -> CelInt {
    ordering(a.0.cmp(&b.0))
}

fn q_greater(a: &QuantityVal, b: &QuantityVal) -> CelBool {
    (a.0 > b.0).into()
}

fn q_less(a: &QuantityVal, b: &QuantityVal) -> CelBool {
    (a.0 < b.0).into()
}

fn q_sign(a: &QuantityVal) -> CelInt {
    a.0.sign().into()
}

fn is_integer(a: &QuantityVal) -> CelBool {
    a.0.as_i64().is_some().into()
}

fn as_integer(a: &QuantityVal) -> Result<CelInt, ExecutionError> {
    let number = a.0.as_i64().map(CelInt::from);
    number.ok_or_else(|| {
        ExecutionError::function_error("asInteger", format!("{} is no 64-bit integer", a.0))
    })
}

fn as_approximate_float(a: &QuantityVal) -> CelDouble {
    a.0.approximate().into()
}

fn q_add(a: &QuantityVal, b: &QuantityVal) -> Result<QuantityVal, ExecutionError> {
    let sum = a.0.checked_add(b.0).map(QuantityVal);
    sum.ok_or_else(|| ExecutionError::function_error("add", "quantity overflow"))
}

fn q_add_int(a: &QuantityVal, b: &CelInt) -> Result<QuantityVal, ExecutionError> {
    q_add(a, &QuantityVal(Quantity::from_units(*b.inner())))
}

fn q_sub(a: &QuantityVal, b: &QuantityVal) -> Result<QuantityVal, ExecutionError> {
    let difference = a.0.checked_sub(b.0).map(QuantityVal);
    difference.ok_or_else(|| ExecutionError::function_error("sub", "quantity overflow"))
}

fn q_sub_int(a: &QuantityVal, b: &CelInt) -> Result<QuantityVal, ExecutionError> {
    q_sub(a, &QuantityVal(Quantity::from_units(*b.inner())))
}

fn versions(env: &mut Env) -> Result<(), DeclarationError> {
    add_overload!(env, fn semver: (CelString) -> Result<SemverVal>)?;
    add_overload!(env, fn semver_normalized: (CelString, CelBool) -> Result<SemverVal>, name = "semver")?;
    add_overload!(env, fn is_semver: (CelString) -> CelBool)?;
    add_overload!(env, fn is_semver_normalized: (CelString, CelBool) -> CelBool, name = "isSemver")?;
    add_member_overload!(env, fn v_compare: (SemverVal, SemverVal) -> CelInt, name = "compareTo")?;
    add_member_overload!(env, fn v_greater: (SemverVal, SemverVal) -> CelBool, name = "isGreaterThan")?;
    add_member_overload!(env, fn v_less: (SemverVal, SemverVal) -> CelBool, name = "isLessThan")?;
    add_member_overload!(env, fn major: (SemverVal) -> CelInt)?;
    add_member_overload!(env, fn minor: (SemverVal) -> CelInt)?;
    add_member_overload!(env, fn patch: (SemverVal) -> CelInt)
}

fn parse_version(text: &str, normalize: bool) -> Result<SemverVal, ExecutionError> {
    let parsed = if normalize {
        Version::normalized(text)
    } else {
        text.parse()
    };
    parsed
        .map(SemverVal)
        .map_err(|e| ExecutionError::function_error("semver", e))
}

fn semver(text: &CelString<'_>) -> Result<SemverVal, ExecutionError> {
    parse_version(text.inner(), false)
}

fn semver_normalized(text: &CelString<'_>, on: &CelBool) -> Result<SemverVal, ExecutionError> {
    parse_version(text.inner(), *on.inner())
}

fn is_semver(text: &CelString<'_>) -> CelBool {
    parse_version(text.inner(), false).is_ok().into()
}

fn is_semver_normalized(text: &CelString<'_>, on: &CelBool) -> CelBool {
    parse_version(text.inner(), *on.inner()).is_ok().into()
}

fn v_compare(a: &SemverVal, b: &SemverVal) -> CelInt {
    ordering(a.0.cmp(&b.0))
}

fn v_greater(a: &SemverVal, b: &SemverVal) -> CelBool {
    (a.0 > b.0).into()
}

fn v_less(a: &SemverVal, b: &SemverVal) -> CelBool {
    (a.0 < b.0).into()
}

fn component(number: u64) -> CelInt {
    i64::try_from(number).unwrap_or(i64::MAX).into()
}

fn major(version: &SemverVal) -> CelInt {
    component(version.0.major())
}

fn minor(version: &SemverVal) -> CelInt {
    component(version.0.minor())
}

fn patch(version: &SemverVal) -> CelInt {
    component(version.0.patch())
}

fn pattern(function: &str, pattern: &CelString<'_>) -> Result<Regex, ExecutionError> {
    Regex::new(pattern.inner()).map_err(|e| ExecutionError::function_error(function, e))
}

fn find(text: &CelString<'_>, regex: &CelString<'_>) -> Result<CelString<'static>, ExecutionError> {
    let regex = pattern("find", regex)?;
    let found = regex.find(text.inner()).map_or("", |m| m.as_str());
    Ok(CelString::from(found.to_owned()))
}

fn find_all(
    text: &CelString<'_>,
    regex: &CelString<'_>,
) -> Result<CelList<'static>, ExecutionError> {
    find_some(text, regex, &CelInt::from(-1))
}

fn find_some(
    text: &CelString<'_>,
    regex: &CelString<'_>,
    limit: &CelInt,
) -> Result<CelList<'static>, ExecutionError> {
    let regex = pattern("findAll", regex)?;
    // A negative limit is none.
    let limit = usize::try_from(*limit.inner()).unwrap_or(usize::MAX);
    let matches = regex.find_iter(text.inner()).take(limit);
    let matches: Vec<Box<dyn Val>> = matches
        .map(|m| -> Box<dyn Val> { Box::new(CelString::from(m.as_str().to_owned())) })
        .collect();
    Ok(CelList::from(matches))
}

/// Kubernetes' list functions, `includes` and the sets extension.
fn lists(env: &mut Env) -> Result<(), DeclarationError> {
    env.add_member_overload("includes", "includes", DYN_TYPE, vec![DYN_TYPE], includes)?;
    env.add_member_overload("isSorted", "isSorted", LIST_TYPE, vec![], is_sorted)?;
    env.add_member_overload("min", "min", LIST_TYPE, vec![], |args| {
        extreme(args, Ordering::Less)
    })?;
    env.add_member_overload("max", "max", LIST_TYPE, vec![], |args| {
        extreme(args, Ordering::Greater)
    })?;
    env.add_member_overload("sum", "sum", LIST_TYPE, vec![], sum)?;
    env.add_member_overload(
        "indexOf",
        "list.indexOf",
        LIST_TYPE,
        vec![DYN_TYPE],
        |args| {
            Ok(position(&args, |items, wanted| {
                items.iter().position(|i| i.equals(wanted))
            }))
        },
    )?;
    env.add_member_overload(
        "lastIndexOf",
        "list.lastIndexOf",
        LIST_TYPE,
        vec![DYN_TYPE],
        |args| {
            Ok(position(&args, |items, wanted| {
                items.iter().rposition(|i| i.equals(wanted))
            }))
        },
    )?;
    let pair = || vec![LIST_TYPE, LIST_TYPE];
    env.add_overload("sets.contains", "sets.contains", pair(), |args| {
        Ok(truth(subset(items(&args, 1), items(&args, 0))))
    })?;
    env.add_overload("sets.equivalent", "sets.equivalent", pair(), |args| {
        let (a, b) = (items(&args, 0), items(&args, 1));
        Ok(truth(subset(a, b) && subset(b, a)))
    })?;
    env.add_overload("sets.intersects", "sets.intersects", pair(), |args| {
        let (a, b) = (items(&args, 0), items(&args, 1));
        Ok(truth(
            a.iter().any(|i| b.iter().any(|j| i.equals(j.as_ref()))),
        ))
    })
}

fn truth<'b, 'v>(truth: bool) -> CowVal<'b, 'v> {
    CowVal::owned(CelBool::from(truth))
}

/// The elements of an argument that is a list; none when it is not.
fn items<'a, 'v>(args: &'a [CowVal<'_, 'v>], index: usize) -> &'a [Box<dyn Val + 'v>] {
    let list = args
        .get(index)
        .and_then(|arg| arg.downcast_ref::<CelList<'v>>());
    list.map_or(&[], CelList::inner)
}

fn subset<'v>(small: &[Box<dyn Val + 'v>], large: &[Box<dyn Val + 'v>]) -> bool {
    small
        .iter()
        .all(|i| large.iter().any(|j| i.equals(j.as_ref())))
}

fn position<'b, 'v>(
    args: &[CowVal<'b, 'v>],
    search: impl Fn(&[Box<dyn Val + 'v>], &dyn Val) -> Option<usize>,
) -> CowVal<'b, 'v> {
    let found = args
        .get(1)
        .and_then(|wanted| search(items(args, 0), wanted.as_ref()));
    CowVal::owned(CelInt::from(
        found.and_then(|i| i64::try_from(i).ok()).unwrap_or(-1),
    ))
}

/// Whether a list attribute holds the value, or another attribute equals it.
fn includes<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let [target, wanted] = args.as_slice() else {
        return Err(ExecutionError::invalid_argument_count(2, args.len()));
    };
    let found = match target.downcast_ref::<CelList<'v>>() {
        Some(list) => list.inner().iter().any(|item| item.equals(wanted.as_ref())),
        None => target.equals(wanted.as_ref()),
    };
    Ok(truth(found))
}

fn compare(a: &dyn Val, b: &dyn Val) -> Result<Ordering, ExecutionError> {
    let comparer = a
        .as_comparer()
        .ok_or_else(|| ExecutionError::UnexpectedType {
            got: a.get_type().name().to_owned(),
            want: "a comparable type".to_owned(),
        })?;
    comparer.compare(b)
}

fn is_sorted<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    for pair in items(&args, 0).windows(2) {
        if compare(pair[0].as_ref(), pair[1].as_ref())? == Ordering::Greater {
            return Ok(truth(false));
        }
    }
    Ok(truth(true))
}

fn extreme<'b, 'v>(
    args: Vec<CowVal<'b, 'v>>,
    wanted: Ordering,
) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let mut items = items(&args, 0).iter();
    let mut best = items
        .next()
        .ok_or_else(|| ExecutionError::function_error("min or max", "empty list"))?;
    for item in items {
        if compare(item.as_ref(), best.as_ref())? == wanted {
            best = item;
        }
    }
    Ok(CowVal::Owned(best.clone_as_boxed()))
}

fn sum<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let mut items = items(&args, 0).iter();
    let Some(first) = items.next() else {
        return Ok(CowVal::owned(CelInt::from(0)));
    };
    let mut total: Box<dyn Val + 'v> = first.clone_as_boxed();
    for item in items {
        let adder = total
            .as_adder()
            .ok_or_else(|| ExecutionError::UnexpectedType {
                got: total.get_type().name().to_owned(),
                want: "a number or a duration".to_owned(),
            })?;
        total = adder.add(item.as_ref())?.into_owned();
    }
    Ok(CowVal::Owned(total))
}
