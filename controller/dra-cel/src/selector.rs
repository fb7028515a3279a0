//! A compiled selector, and the device that it judges.

use std::fmt;
use std::sync::Arc;

use cel::common::ast::IdedExpr;
use cel::common::types::CelBool;
use cel::{Context, Env, ExecutionError, Value};

use crate::library::ENVIRONMENT;
use crate::values::{DeviceFields, DeviceVal, Domains, Leaf, QuantityVal};
use crate::{AttributeValue, Quantity, check, meter};

/// Most bytes of an expression that the API server accepts.
pub const MAX_EXPRESSION_BYTES: usize = 10 * 1024;

/// Deepest nesting of a selector, metering included. The implementation
/// evaluates recursively; a level takes about 50 KiB of stack in an unoptimised
/// build, and selectors in use are less than ten deep.
const MAX_DEPTH: usize = 28;

/// Stack of the thread that parses.
const COMPILER_STACK_BYTES: usize = 32 * 1024 * 1024;

/// Why an expression is not a selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// Longer than [`MAX_EXPRESSION_BYTES`].
    #[error("the expression has {0} bytes, at most {MAX_EXPRESSION_BYTES} are allowed")]
    TooLong(usize),
    /// It is not CEL.
    #[error("syntax error: {0}")]
    Syntax(String),
    /// Its operations are nested too deeply.
    #[error("the expression is nested {depth} deep, at most {limit} is allowed")]
    TooDeep {
        /// How deep.
        depth: usize,
        /// How deep it may be.
        limit: usize,
    },
    /// It names a variable, function or field that does not exist.
    #[error("undeclared reference to '{0}'")]
    Undeclared(String),
    /// Kubernetes has this function for selectors, this planner does not.
    #[error("function '{0}' is not supported here, although Kubernetes accepts it")]
    Unsupported(String),
    /// It puts values of different types side by side.
    #[error("{place} of {left} with {right} is no match of types")]
    Types {
        /// What puts them side by side.
        place: &'static str,
        /// The first type.
        left: &'static str,
        /// The second type.
        right: &'static str,
    },
    /// A regular expression in it does not compile.
    #[error("invalid regular expression: {0}")]
    Regex(String),
    /// Its result is certainly not a truth value.
    #[error("must evaluate to bool, not {found}")]
    NotBool {
        /// The result's type.
        found: &'static str,
    },
    /// The environment itself could not be built: a defect of this crate.
    #[error("the CEL environment is broken: {0}")]
    Environment(String),
}

/// Why a selector cannot judge a device. Kubernetes aborts the allocation then;
/// it is not "no match".
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationError {
    /// The device has no attribute or capacity of this name.
    #[error("no such key: {0} (a selector can ask with has() or use .?{0}.orValue())")]
    NoSuchKey(String),
    /// The result is not a truth value.
    #[error("result of type {0} cannot be converted to bool")]
    NotBool(String),
    /// The evaluation was stopped by the cost limit.
    #[error("cost limit exceeded")]
    CostLimit,
    /// Anything else that the expression ran into.
    #[error("{0}")]
    Runtime(String),
}

/// A device as selectors see it. Cheap to clone; build it once and let every
/// selector judge it.
#[derive(Debug, Clone)]
pub struct DeviceFacts(DeviceVal);

impl DeviceFacts {
    /// Facts of one device. Names without a domain belong to the driver's.
    pub fn new<'a>(
        driver: &str,
        allow_multiple_allocations: bool,
        attributes: impl IntoIterator<Item = (&'a str, &'a AttributeValue)>,
        capacity: impl IntoIterator<Item = (&'a str, Quantity)>,
    ) -> Self {
        let mut fields = DeviceFields {
            driver: driver.to_owned().into(),
            allow_multiple_allocations: allow_multiple_allocations.into(),
            attributes: Domains::default(),
            capacity: Domains::default(),
        };
        for (name, value) in attributes {
            fields.attributes.insert(name, driver, Leaf::from(value));
        }
        for (name, value) in capacity {
            fields
                .capacity
                .insert(name, driver, Leaf::Quantity(QuantityVal(value)));
        }
        Self(DeviceVal(Arc::new(fields)))
    }
}

/// A compiled CEL selector of a DeviceClass or a request.
///
/// Compiling costs about a millisecond, judging a device microseconds; keep
/// compiled selectors by their expression.
pub struct Selector {
    source: String,
    expression: IdedExpr,
    environment: Arc<Env>,
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Selector").field(&self.source).finish()
    }
}

impl Selector {
    /// Compiles an expression.
    ///
    /// # Errors
    /// When it is not an expression that could select a device.
    pub fn compile(source: &str) -> Result<Self, CompileError> {
        if source.len() > MAX_EXPRESSION_BYTES {
            return Err(CompileError::TooLong(source.len()));
        }
        // The parser recurses for every level of a grammar with many levels, and
        // callers are often on threads with small stacks.
        std::thread::scope(|scope| {
            let compiler = std::thread::Builder::new()
                .name("cel-compiler".to_owned())
                .stack_size(COMPILER_STACK_BYTES)
                .spawn_scoped(scope, || Self::parse(source))
                .map_err(|e| CompileError::Environment(e.to_string()))?;
            compiler.join().unwrap_or_else(|_| {
                Err(CompileError::Environment(
                    "the CEL parser panicked".to_owned(),
                ))
            })
        })
    }

    fn parse(source: &str) -> Result<Self, CompileError> {
        let environment = ENVIRONMENT
            .as_ref()
            .map_err(|e| CompileError::Environment(e.to_string()))?;
        let program = environment
            .compile(source)
            .map_err(|e| CompileError::Syntax(e.to_string()))?;
        check::check(program.expression())?;
        let mut expression = program.expression().clone();
        meter::instrument(&mut expression);
        let depth = check::depth(&expression);
        if depth > MAX_DEPTH {
            return Err(CompileError::TooDeep {
                depth,
                limit: MAX_DEPTH,
            });
        }
        Ok(Self {
            source: source.to_owned(),
            expression,
            environment: environment.clone(),
        })
    }

    /// The expression as it was written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the device matches.
    ///
    /// # Errors
    /// When the expression cannot be judged on this device.
    pub fn matches(&self, device: &DeviceFacts) -> Result<bool, EvaluationError> {
        let mut context = Context::with_env(self.environment.clone());
        context.add_variable_as_val("device", Box::new(device.0.clone()));
        let (result, exhausted) = meter::metered(|| {
            let value = Value::resolve_val(&self.expression, &context).map_err(runtime)?;
            match value.downcast_ref::<CelBool>() {
                Some(truth) => Ok(*truth.inner()),
                None => Err(EvaluationError::NotBool(value.get_type().name().to_owned())),
            }
        });
        if exhausted {
            Err(EvaluationError::CostLimit)
        } else {
            result
        }
    }
}

fn runtime(error: ExecutionError) -> EvaluationError {
    match error {
        ExecutionError::NoSuchKey(key) => EvaluationError::NoSuchKey(key.to_string()),
        other => EvaluationError::Runtime(other.to_string()),
    }
}
