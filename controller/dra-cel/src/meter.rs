//! Bounds what one evaluation may cost.
//!
//! The CEL implementation has neither a cost limit nor an interrupt. A pass
//! over the syntax tree wraps everything that repeats or grows (loop steps,
//! sums, literals of lists and maps, functions that lengthen text) in a call
//! that no source can write, and that call draws on a budget. A selector
//! without any of these runs as parsed.

use std::cell::Cell;

use cel::ExecutionError;
use cel::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, operators,
};
use cel::common::types::{CelBytes, CelInt, CelList, CelMap, CelOptional, CelString};
use cel::common::value::{CowVal, Val};

use crate::{check, library};

/// Name of the metering call; `@` keeps it out of reach of any source.
pub(crate) const FUNCTION: &str = "@meter";

/// Budget of one evaluation: as many units as the cost limit that Kubernetes
/// gives a selector (`CELSelectorExpressionMaxCost`).
pub(crate) const BUDGET: i64 = 1_000_000;

/// Most bytes of a text, elements of a list or entries of a map that an
/// expression computes. Attribute values have at most 64 characters.
const LARGEST: usize = 4096;

/// What a regular expression costs beside other calls, since each run compiles
/// its pattern.
const REGEX_WEIGHT: i64 = 200;

thread_local! {
    static LEFT: Cell<i64> = const { Cell::new(BUDGET) };
}

/// Runs an evaluation with a fresh budget; the second value says whether it
/// ran out, even where the expression swallowed the error (`… || true`).
pub(crate) fn metered<T>(evaluation: impl FnOnce() -> T) -> (T, bool) {
    let outer = LEFT.with(|left| left.replace(BUDGET));
    let result = evaluation();
    let left = LEFT.with(|left| left.replace(outer));
    (result, left < 0)
}

/// The metering call: charges the weight and the size of the value, and hands
/// the value on.
pub(crate) fn charge<'b, 'v>(args: Vec<CowVal<'b, 'v>>) -> Result<CowVal<'b, 'v>, ExecutionError> {
    let [value, weight] = <[CowVal<'b, 'v>; 2]>::try_from(args)
        .map_err(|args| ExecutionError::invalid_argument_count(2, args.len()))?;
    let weight = weight.downcast_ref::<CelInt>().map_or(1, |w| *w.inner());
    let cost = weight.saturating_add(size(value.as_ref())?);
    let left = LEFT.with(|left| {
        left.set(left.get().saturating_sub(cost));
        left.get()
    });
    if left < 0 {
        Err(exhausted("the selector costs too much"))
    } else {
        Ok(value)
    }
}

fn exhausted(message: &str) -> ExecutionError {
    LEFT.with(|left| left.set(-1));
    ExecutionError::function_error(FUNCTION, message)
}

/// What a value costs to hold and copy.
fn size(value: &dyn Val) -> Result<i64, ExecutionError> {
    let bounded = |length: usize| {
        if length > LARGEST {
            return Err(exhausted("the selector computes too large a value"));
        }
        Ok(i64::try_from(length).unwrap_or(i64::MAX))
    };
    if let Some(text) = value.downcast_ref::<CelString<'_>>() {
        return Ok(bounded(text.inner().len())? / 16);
    }
    if let Some(bytes) = value.downcast_ref::<CelBytes<'_>>() {
        return Ok(bounded(bytes.inner().len())? / 16);
    }
    let mut total;
    if let Some(list) = value.downcast_ref::<CelList<'_>>() {
        total = bounded(list.inner().len())?;
        for item in list.inner() {
            total = total.saturating_add(size(item.as_ref())?);
        }
    } else if let Some(map) = value.downcast_ref::<CelMap<'_>>() {
        total = bounded(map.inner().len())?;
        for item in map.inner().values() {
            total = total.saturating_add(size(item.as_ref())?);
        }
    } else if let Some(optional) = value.downcast_ref::<CelOptional<'_>>() {
        total = 1;
        if let Some(inner) = optional.inner() {
            total = total.saturating_add(size(inner)?);
        }
    } else {
        return Ok(0);
    }
    if total > BUDGET {
        return Err(exhausted("the selector computes too large a value"));
    }
    Ok(total)
}

/// Wraps what repeats or grows below this node, and makes comparisons for
/// equality those of [`library`].
pub(crate) fn instrument(node: &mut IdedExpr) {
    match &mut node.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) => {}
        Expr::Select(select) => instrument(&mut select.operand),
        Expr::Struct(literal) => literal.entries.iter_mut().for_each(|e| entry(&mut e.expr)),
        Expr::Map(literal) => literal.entries.iter_mut().for_each(|e| entry(&mut e.expr)),
        Expr::List(list) => {
            for element in &mut list.elements {
                instrument(element);
                wrap(element, 1);
            }
        }
        Expr::Call(call) => {
            if call.func_name == operators::EQUALS {
                call.func_name = library::EQUALS.to_owned();
            } else if call.func_name == operators::NOT_EQUALS {
                call.func_name = library::NOT_EQUALS.to_owned();
            }
            let grows = grows(&call.func_name);
            // Operands too: replacing long text by long text multiplies. The name
            // before a qualified function (`lists.range`) is no value.
            if let Some(target) = call.target.as_deref_mut() {
                instrument(target);
                if grows && !check::is_namespace(target) {
                    wrap(target, 1);
                }
            }
            for argument in &mut call.args {
                instrument(argument);
                if grows {
                    wrap(argument, 1);
                }
            }
            if grows {
                wrap(node, 1);
            }
        }
        Expr::Comprehension(comprehension) => comprehend(comprehension),
    }
}

fn entry(entry: &mut EntryExpr) {
    match entry {
        EntryExpr::StructField(field) => {
            instrument(&mut field.value);
            wrap(&mut field.value, 1);
        }
        EntryExpr::MapEntry(entry) => {
            instrument(&mut entry.key);
            instrument(&mut entry.value);
            wrap(&mut entry.value, 1);
        }
    }
}

fn comprehend(loop_: &mut ComprehensionExpr) {
    let weight = weight(&loop_.loop_step).saturating_add(weight(&loop_.loop_cond));
    instrument(&mut loop_.iter_range);
    instrument(&mut loop_.accu_init);
    instrument(&mut loop_.result);
    if !matches!(loop_.loop_cond.expr, Expr::Literal(_)) {
        instrument(&mut loop_.loop_cond);
        instrument(&mut loop_.loop_step);
        wrap(&mut loop_.loop_cond, weight);
        return;
    }
    // `map` and `filter`: the implementation recognises their shape and appends
    // in place, which wrapping the condition or the sum would turn off.
    append_step(&mut loop_.loop_step, weight);
}

/// Instruments `@result + [x]`, or `guard ? @result + [x] : @result`.
fn append_step(step: &mut IdedExpr, weight: i64) {
    if let Expr::Call(call) = &mut step.expr {
        match (call.func_name.as_str(), call.args.as_mut_slice()) {
            (operators::CONDITIONAL, [guard, append, _]) => {
                instrument(guard);
                wrap(guard, weight);
                append_step(append, 0);
                return;
            }
            (
                operators::ADD,
                [
                    _,
                    IdedExpr {
                        expr: Expr::List(list),
                        ..
                    },
                ],
            ) => {
                for element in &mut list.elements {
                    instrument(element);
                    wrap(element, weight);
                }
                return;
            }
            _ => {}
        }
    }
    instrument(step);
    wrap(step, weight);
}

/// Whether a call's result may be larger than its operands.
fn grows(function: &str) -> bool {
    matches!(
        function,
        operators::ADD
            | "replace"
            | "join"
            | "format"
            | "split"
            | "flatten"
            | "quote"
            | "strings.quote"
            | "findAll"
            | "range"
            | "lists.range"
    )
}

/// How many nodes a loop's step evaluates at most, loops inside it aside.
fn weight(node: &IdedExpr) -> i64 {
    let sum = |nodes: &mut dyn Iterator<Item = &IdedExpr>| nodes.map(weight).sum::<i64>();
    1 + match &node.expr {
        Expr::Unspecified | Expr::Ident(_) | Expr::Literal(_) | Expr::Struct(_) => 0,
        Expr::Select(select) => weight(&select.operand),
        Expr::List(list) => sum(&mut list.elements.iter()),
        Expr::Map(map) => i64::try_from(map.entries.len()).unwrap_or(i64::MAX / 2),
        Expr::Call(call) => {
            let regex = matches!(call.func_name.as_str(), "matches" | "find" | "findAll");
            let own = if regex { REGEX_WEIGHT } else { 0 };
            own + sum(&mut call.target.as_deref().into_iter().chain(&call.args))
        }
        Expr::Comprehension(inner) => {
            sum(&mut [&inner.iter_range, &inner.accu_init, &inner.result].into_iter())
        }
    }
}

fn wrap(node: &mut IdedExpr, weight: i64) {
    if matches!(node.expr, Expr::Literal(_)) {
        return;
    }
    let inner = std::mem::take(node);
    let literal = Expr::Literal(LiteralValue::Int(weight.into()));
    *node = IdedExpr {
        id: inner.id,
        expr: Expr::Call(CallExpr {
            func_name: FUNCTION.to_owned(),
            target: None,
            args: vec![
                inner,
                IdedExpr {
                    id: 0,
                    expr: literal,
                },
            ],
        }),
    };
}
