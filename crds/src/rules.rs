//! Validation rules (CEL) that several fields share.
//!
//! In: which field, which shape. Out: a rule with a message that names the field and the remedy. A
//! rule here never depends on anything but the object itself: what needs other objects is a
//! condition of the order or the class.

use kube::core::{Reason, Rule};

/// A rule that refuses a value unless `cel` is true.
pub(crate) fn invalid(cel: impl Into<String>, message: impl AsRef<str>) -> Rule {
    Rule::new(cel)
        .message(message.as_ref())
        .reason(Reason::FieldValueInvalid)
}

/// A rule that refuses a field that is legal elsewhere and not in this combination.
pub(crate) fn forbidden(
    cel: impl Into<String>,
    field_path: &str,
    message: impl AsRef<str>,
) -> Rule {
    Rule::new(cel)
        .message(message.as_ref())
        .reason(Reason::FieldValueForbidden)
        .field_path(field_path)
}

/// A rule that asks for a field which this combination needs.
pub(crate) fn required(cel: impl Into<String>, field_path: &str, message: impl AsRef<str>) -> Rule {
    Rule::new(cel)
        .message(message.as_ref())
        .reason(Reason::FieldValueRequired)
        .field_path(field_path)
}

/// The list holds nothing twice. Needs `maxItems` on the list, or the API server refuses the cost.
/// Its reason is not `FieldValueDuplicate`, with which the API server drops the message.
pub(crate) fn unique(field: &str) -> Rule {
    invalid(
        "self.all(a, self.exists_one(b, a == b))",
        format!("{field} names a value twice: remove the repeated one"),
    )
}

/// The list holds at least one value.
pub(crate) fn not_empty(field: &str, remedy: &str) -> Rule {
    Rule::new("size(self) > 0")
        .message(format!("{field} must not be empty: {remedy}").as_str())
        .reason(Reason::FieldValueRequired)
}

/// A name of a Kubernetes object whose name is a DNS subdomain.
pub(crate) fn object_name(field: &str, what: &str) -> Rule {
    invalid(
        format!("self.matches('{SUBDOMAIN}')"),
        format!(
            "{field} must be the name of {what}: lower-case letters, digits, '-' and '.', beginning and ending with a letter or a digit"
        ),
    )
}

/// Each element is a name of a Kubernetes object whose name is a DNS subdomain.
pub(crate) fn object_names(field: &str, what: &str) -> Rule {
    invalid(
        format!("self.all(name, name.matches('{SUBDOMAIN}'))"),
        format!(
            "each of {field} must be the name of {what}: lower-case letters, digits, '-' and '.', beginning and ending with a letter or a digit"
        ),
    )
}

/// A path inside a volume or a repository: relative, no way out of it.
pub(crate) fn relative_path(field: &str) -> Rule {
    invalid(
        r"!self.startsWith('/') && !self.contains('\\') && !self.split('/').exists(part, part == '..' || part == '.' || part == '')",
        format!(
            "{field} must be a relative path without '..', '.', '//' or a backslash, such as 'models/chat'"
        ),
    )
}

/// RFC 1123 subdomain, as Kubernetes checks names.
const SUBDOMAIN: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
