//! What can be said about an expression without a device.
//!
//! Kubernetes type-checks selectors; the CEL implementation here does not. This
//! finds what people get wrong in practice: unknown variables, functions and
//! fields of `device`, results that are certainly not a truth value, and
//! regular expressions that do not compile. A type error inside an expression
//! is found when a device is judged.

use cel::common::ast::{CallExpr, EntryExpr, Expr, IdedExpr, LiteralValue, operators};

use crate::library::UNSUPPORTED;
use crate::selector::CompileError;

/// Every function that an expression may call: standard, strings, lists,
/// optionals, and those of [`crate::library`].
const FUNCTIONS: &[&str] = &[
    "size",
    "int",
    "uint",
    "double",
    "string",
    "bytes",
    "bool",
    "dyn",
    "type",
    "duration",
    "timestamp",
    "contains",
    "startsWith",
    "endsWith",
    "matches",
    "getFullYear",
    "getMonth",
    "getDate",
    "getDayOfMonth",
    "getDayOfWeek",
    "getDayOfYear",
    "getHours",
    "getMinutes",
    "getSeconds",
    "getMilliseconds",
    "charAt",
    "indexOf",
    "lastIndexOf",
    "lowerAscii",
    "upperAscii",
    "replace",
    "split",
    "substring",
    "trim",
    "join",
    "format",
    "quote",
    "slice",
    "flatten",
    "distinct",
    "reverse",
    "sort",
    "@sortByAssociatedKeys",
    "range",
    "of",
    "none",
    "ofNonZeroValue",
    "hasValue",
    "value",
    "or",
    "orValue",
    "equivalent",
    "intersects",
    "isSorted",
    "sum",
    "min",
    "max",
    "includes",
    "find",
    "findAll",
    "quantity",
    "isQuantity",
    "isInteger",
    "asInteger",
    "asApproximateFloat",
    "sign",
    "add",
    "sub",
    "isLessThan",
    "isGreaterThan",
    "compareTo",
    "semver",
    "isSemver",
    "major",
    "minor",
    "patch",
];

/// Functions whose result is certainly not a truth value, with its type.
const TYPED: &[(&str, &str)] = &[
    ("size", "int"),
    ("int", "int"),
    ("uint", "uint"),
    ("double", "double"),
    ("string", "string"),
    ("quantity", "kubernetes.Quantity"),
    ("semver", "kubernetes.Semver"),
    ("compareTo", "int"),
    ("lowerAscii", "string"),
    ("upperAscii", "string"),
    ("trim", "string"),
    ("replace", "string"),
    ("split", "list"),
    ("join", "string"),
    ("asInteger", "int"),
    ("asApproximateFloat", "double"),
    ("sign", "int"),
    ("major", "int"),
    ("minor", "int"),
    ("patch", "int"),
    ("find", "string"),
    ("findAll", "list"),
    ("charAt", "string"),
    ("substring", "string"),
];

/// Prefixes of qualified function names.
const NAMESPACES: &[&str] = &["cel", "lists", "math", "optional", "sets", "strings"];

/// Names of types, which are values.
const TYPES: &[&str] = &[
    "bool",
    "bytes",
    "double",
    "int",
    "list",
    "map",
    "null_type",
    "string",
    "type",
    "uint",
    "optional_type",
];

const DEVICE_FIELDS: &[&str] = &[
    "driver",
    "allowMultipleAllocations",
    "attributes",
    "capacity",
];

/// Checks a parsed expression.
pub(crate) fn check(expression: &IdedExpr) -> Result<(), CompileError> {
    if let Some(found) = certain_type(&expression.expr)
        && found != "bool"
    {
        return Err(CompileError::NotBool { found });
    }
    walk(expression, &mut Vec::new())
}

/// How many nodes lie on the longest path below this one, itself included. A
/// comprehension counts double: it evaluates in a scope of its own.
pub(crate) fn depth(node: &IdedExpr) -> usize {
    let deepest = |nodes: &mut dyn Iterator<Item = &IdedExpr>| nodes.map(depth).max().unwrap_or(0);
    1 + match &node.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) | Expr::Struct(_) => 0,
        Expr::Select(select) => depth(&select.operand),
        Expr::List(list) => deepest(&mut list.elements.iter()),
        Expr::Map(map) => {
            let values = map.entries.iter().map(|entry| match &entry.expr {
                EntryExpr::MapEntry(entry) => depth(&entry.key).max(depth(&entry.value)),
                EntryExpr::StructField(field) => depth(&field.value),
            });
            values.max().unwrap_or(0)
        }
        Expr::Call(call) => deepest(&mut call.target.as_deref().into_iter().chain(&call.args)),
        Expr::Comprehension(c) => {
            let parts = [
                &c.iter_range,
                &c.accu_init,
                &c.loop_cond,
                &c.loop_step,
                &c.result,
            ];
            1 + deepest(&mut parts.into_iter())
        }
    }
}

/// The type of the result when it is certain.
fn certain_type(expr: &Expr) -> Option<&'static str> {
    match expr {
        Expr::Literal(literal) => match literal {
            LiteralValue::Boolean(_) => Some("bool"),
            LiteralValue::Bytes(_) => Some("bytes"),
            LiteralValue::Double(_) => Some("double"),
            LiteralValue::Int(_) => Some("int"),
            LiteralValue::Null => Some("null_type"),
            LiteralValue::String(_) => Some("string"),
            LiteralValue::UInt(_) => Some("uint"),
        },
        Expr::List(_) => Some("list"),
        Expr::Map(_) => Some("map"),
        Expr::Ident(name) if name == "device" => Some("kubernetes.DRADevice"),
        Expr::Select(select) if !select.test && is_device(&select.operand) => {
            match select.field.as_str() {
                "driver" => Some("string"),
                "attributes" | "capacity" => Some("map"),
                _ => None,
            }
        }
        Expr::Call(call) => TYPED
            .iter()
            .find(|(name, _)| *name == call.func_name)
            .map(|(_, found)| *found),
        _ => None,
    }
}

fn shadowed(node: &IdedExpr, scope: &[&str]) -> bool {
    matches!(&node.expr, Expr::Ident(name) if scope.contains(&name.as_str()))
}

/// Whether the node is the name before a qualified function.
pub(crate) fn is_namespace(node: &IdedExpr) -> bool {
    matches!(&node.expr, Expr::Ident(name) if NAMESPACES.contains(&name.as_str()))
}

fn is_device(node: &IdedExpr) -> bool {
    matches!(&node.expr, Expr::Ident(name) if name == "device")
}

fn walk<'e>(node: &'e IdedExpr, scope: &mut Vec<&'e str>) -> Result<(), CompileError> {
    match &node.expr {
        Expr::Unspecified | Expr::Literal(_) => Ok(()),
        Expr::Ident(name) => variable(name, scope),
        Expr::Select(select) => {
            let shadowed = scope.contains(&"device");
            if is_device(&select.operand)
                && !shadowed
                && !DEVICE_FIELDS.contains(&select.field.as_str())
            {
                return Err(CompileError::Undeclared(format!("device.{}", select.field)));
            }
            walk(&select.operand, scope)
        }
        Expr::Call(call) => function(call, scope),
        Expr::List(list) => {
            // Kubernetes wants lists of one type.
            for pair in list.elements.windows(2) {
                same_type("a list", &pair[0], &pair[1])?;
            }
            list.elements.iter().try_for_each(|e| walk(e, scope))
        }
        Expr::Struct(literal) => Err(CompileError::Undeclared(literal.type_name.clone())),
        Expr::Map(map) => map.entries.iter().try_for_each(|entry| match &entry.expr {
            EntryExpr::MapEntry(entry) => {
                walk(&entry.key, scope).and_then(|()| walk(&entry.value, scope))
            }
            EntryExpr::StructField(field) => walk(&field.value, scope),
        }),
        Expr::Comprehension(c) => {
            walk(&c.iter_range, scope)?;
            walk(&c.accu_init, scope)?;
            let outer = scope.len();
            scope.extend([c.accu_var.as_str(), c.iter_var.as_str()]);
            scope.extend(c.iter_var2.as_deref());
            [&c.loop_cond, &c.loop_step, &c.result]
                .into_iter()
                .try_for_each(|n| walk(n, scope))?;
            scope.truncate(outer);
            Ok(())
        }
    }
}

/// Refuses two operands whose types are certain and differ.
fn same_type(place: &'static str, a: &IdedExpr, b: &IdedExpr) -> Result<(), CompileError> {
    let Some((left, right)) = certain_type(&a.expr).zip(certain_type(&b.expr)) else {
        return Ok(());
    };
    if left == right || left == "null_type" || right == "null_type" {
        return Ok(());
    }
    Err(CompileError::Types { place, left, right })
}

fn variable(name: &str, scope: &[&str]) -> Result<(), CompileError> {
    if name == "device" || scope.contains(&name) || TYPES.contains(&name) {
        return Ok(());
    }
    Err(CompileError::Undeclared(name.to_owned()))
}

fn function<'e>(call: &'e CallExpr, scope: &mut Vec<&'e str>) -> Result<(), CompileError> {
    let name = call.func_name.as_str();
    let operator = name.starts_with(['_', '!', '-', '@']);
    if !operator && !FUNCTIONS.contains(&name) {
        return Err(if UNSUPPORTED.contains(&name) {
            CompileError::Unsupported(name.to_owned())
        } else {
            CompileError::Undeclared(name.to_owned())
        });
    }
    if let (operators::EQUALS | operators::NOT_EQUALS, [left, right]) = (name, call.args.as_slice())
    {
        same_type("a comparison", left, right)?;
    }
    if matches!(name, "matches" | "find" | "findAll") {
        // The last text literal of a member or global call is the pattern.
        let pattern = call.args.iter().rev().find_map(|arg| match &arg.expr {
            Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
            _ => None,
        });
        if let Some(Err(error)) = pattern.map(regex::Regex::new) {
            return Err(CompileError::Regex(error.to_string()));
        }
    }
    if let Some(target) = call.target.as_deref()
        && (!is_namespace(target) || shadowed(target, scope))
    {
        walk(target, scope)?;
    }
    // The second operand of `a.?b` is a field's name.
    let operands = if name == operators::OPT_SELECT {
        &call.args[..1]
    } else {
        &call.args[..]
    };
    operands.iter().try_for_each(|arg| walk(arg, scope))
}
