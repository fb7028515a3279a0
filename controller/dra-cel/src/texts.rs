//! Quantities and versions as text.

use proptest::prelude::*;
use rstest::rstest;

use crate::{Quantity, QuantityError, Selector, Version};

#[rstest]
#[case("0", "0")]
#[case("00", "0")]
#[case("1024", "1024")]
#[case("1024Ki", "1Mi")]
#[case("1Gi", "1Gi")]
#[case("1.5Gi", "1536Mi")]
#[case("1.5", "1500m")]
#[case("1500m", "1500m")]
#[case("1000m", "1")]
#[case("1000k", "1M")]
#[case("12e6", "12e6")]
#[case("12E6", "12e6")]
#[case("1E", "1E")]
#[case("0.5Ki", "512")]
#[case("1023Ki", "1023Ki")]
#[case("-1Ki", "-1Ki")]
#[case("+5", "5")]
#[case("0.1n", "1n")]
#[case("-0.1n", "-1n")]
#[case(".5", "500m")]
#[case("5.", "5")]
#[case("8Ei", "9223372036854775807")]
#[case("85899345920", "85899345920")]
#[case("0.1Ki", "102400m")]
fn a_quantity_prints_canonically(#[case] text: &str, #[case] canonical: &str) {
    assert_eq!(text.parse::<Quantity>().unwrap().to_string(), canonical);
}

#[rstest]
#[case::empty("")]
#[case::no_number("Mi")]
#[case::comma("1,3G")]
#[case::word("Three")]
#[case::wrong_case("200K")]
#[case::space("1 Gi")]
#[case::two_signs("--1")]
#[case::two_points("1.2.3")]
#[case::point_alone(".")]
#[case::exponent_alone("1e")]
fn what_is_no_quantity_is_refused(#[case] text: &str) {
    assert!(text.parse::<Quantity>().is_err());
}

#[test]
fn a_quantity_beyond_the_range_is_an_error_and_not_a_wrong_number() {
    let text = "9999999999999999999999999999999999999G";
    assert_eq!(
        text.parse::<Quantity>(),
        Err(QuantityError::TooLarge(text.to_owned()))
    );
}

#[rstest]
#[case("200M", "0.2G", std::cmp::Ordering::Equal)]
#[case("50M", "50Mi", std::cmp::Ordering::Less)]
#[case("1Gi", "1024Mi", std::cmp::Ordering::Equal)]
#[case("1m", "1u", std::cmp::Ordering::Greater)]
fn quantities_compare_by_number(
    #[case] a: Quantity,
    #[case] b: Quantity,
    #[case] expected: std::cmp::Ordering,
) {
    assert_eq!(a.cmp(&b), expected);
}

#[rstest]
#[case("1Gi", "5Gi", "1Gi", "5Gi")]
#[case("5Gi", "1Gi", "1Gi", "5Gi")]
#[case("5.2Gi", "1Gi", "1Gi", "6Gi")]
#[case("7", "1", "0", "7")]
fn a_request_rounds_up_to_the_step(
    #[case] request: Quantity,
    #[case] min: Quantity,
    #[case] step: Quantity,
    #[case] expected: Quantity,
) {
    assert_eq!(request.round_up(min, step), expected);
}

#[rstest]
#[case("1.2.3", "1.2.3")]
#[case("0.1.0-alpha.1", "0.1.0-alpha.1")]
#[case("1.0.0+build.01", "1.0.0+build.01")]
fn a_version_prints_as_it_was_written(#[case] text: &str, #[case] printed: &str) {
    assert_eq!(text.parse::<Version>().unwrap().to_string(), printed);
}

#[rstest]
#[case::two_numbers("9.0")]
#[case::leading_zero("1.02.3")]
#[case::v("v1.0.0")]
#[case::empty_prerelease("1.0.0-")]
#[case::numeric_prerelease_zero("1.0.0-01")]
#[case::word("hello")]
#[case::four("1.2.3.4")]
fn what_is_no_version_is_refused(#[case] text: &str) {
    assert!(text.parse::<Version>().is_err());
}

#[rstest]
#[case("v1.0.0", "1.0.0")]
#[case("1.0", "1.0.0")]
#[case("1", "1.0.0")]
#[case("01.01.01", "1.1.1")]
#[case("550.090.07", "550.90.7")]
#[case("1.00.0-rc.1", "1.0.0-rc.1")]
fn a_lenient_version_is_normalised(#[case] text: &str, #[case] printed: &str) {
    assert_eq!(Version::normalized(text).unwrap().to_string(), printed);
}

#[test]
fn versions_are_ordered_as_semver_orders_them() {
    let texts = [
        "1.0.0-alpha",
        "1.0.0-alpha.1",
        "1.0.0-alpha.beta",
        "1.0.0-beta.2",
        "1.0.0-beta.11",
        "1.0.0-rc.1",
        "1.0.0",
        "1.0.1",
        "1.10.0",
        "2.0.0",
    ];
    let versions: Vec<Version> = texts.iter().map(|t| t.parse().unwrap()).collect();
    assert!(versions.is_sorted());
    assert_eq!("1.0.0+a".parse::<Version>(), "1.0.0+b".parse());
}

proptest! {
    #[test]
    fn a_quantity_survives_printing(nano in -(1_i128 << 90)..(1_i128 << 90)) {
        let quantity = Quantity::from_nano(nano);
        prop_assert_eq!(quantity.to_string().parse::<Quantity>().unwrap(), quantity);
    }

    #[test]
    fn bytes_survive_printing(bytes in 0..(i64::MAX as u64)) {
        let quantity = Quantity::from_bytes(bytes);
        let parsed: Quantity = quantity.to_string().parse().unwrap();
        prop_assert_eq!(parsed, quantity);
        prop_assert_eq!(parsed.to_bytes(), Some(bytes));
    }

    #[test]
    fn canonical_text_is_a_fixed_point(text in "[+-]?[0-9]{0,12}(\\.[0-9]{0,12})?([numkMGTPE]|[KMGTPE]i|e-?[0-9]|)") {
        if let Ok(quantity) = text.parse::<Quantity>() {
            let canonical = quantity.to_string();
            prop_assert_eq!(canonical.parse::<Quantity>().unwrap().to_string(), canonical);
        }
    }

    #[test]
    fn no_text_makes_a_parser_panic(text in ".{0,40}") {
        let _ = text.parse::<Quantity>();
        let _ = text.parse::<Version>();
        let _ = Version::normalized(&text);
        let _ = Selector::compile(&text);
    }
}
