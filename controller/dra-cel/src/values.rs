//! Kubernetes' types as values of the CEL implementation, and the `device`
//! variable.

use std::sync::Arc;

use cel::ExecutionError;
use cel::common::traits::{Container, Indexer, Iterable, Iterator as ValIterator, Sizer};
use cel::common::types::{CelBool, CelInt, CelList, CelString, MAP_TYPE, Type};
use cel::common::value::{CowVal, StaticVal, Val};

use crate::{AttributeValue, Quantity, Version};

static QUANTITY_TYPE: Type = Type::new_unspecified_type("kubernetes.Quantity");
static SEMVER_TYPE: Type = Type::new_unspecified_type("kubernetes.Semver");
static DEVICE_TYPE: Type = Type::new_unspecified_type("kubernetes.DRADevice");

/// A quantity as a CEL value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QuantityVal(pub(crate) Quantity);

/// A version as a CEL value.
#[derive(Debug, Clone)]
pub(crate) struct SemverVal(pub(crate) Version);

/// The `device` variable; a clone shares the facts.
#[derive(Debug, Clone)]
pub(crate) struct DeviceVal(pub(crate) Arc<DeviceFields>);

/// The fields of the `device` variable.
#[derive(Debug)]
pub(crate) struct DeviceFields {
    pub(crate) driver: CelString<'static>,
    pub(crate) allow_multiple_allocations: CelBool,
    pub(crate) attributes: Domains,
    pub(crate) capacity: Domains,
}

/// A leaf below `device.attributes["domain"]` or `device.capacity["domain"]`.
#[derive(Debug, Clone)]
pub(crate) enum Leaf {
    Text(CelString<'static>),
    Int(CelInt),
    Bool(CelBool),
    Version(SemverVal),
    Quantity(QuantityVal),
    List(CelList<'static>),
}

impl Leaf {
    fn as_val<'b, 'v>(&'b self) -> &'b (dyn Val + 'v) {
        match self {
            Self::Text(text) => text,
            Self::Int(number) => number,
            Self::Bool(truth) => truth,
            Self::Version(version) => version,
            Self::Quantity(quantity) => quantity,
            Self::List(list) => list,
        }
    }
}

impl From<&AttributeValue> for Leaf {
    fn from(value: &AttributeValue) -> Self {
        fn list<T>(items: &[T], to_val: impl Fn(&T) -> Box<dyn Val>) -> Leaf {
            Leaf::List(CelList::from(items.iter().map(to_val).collect::<Vec<_>>()))
        }
        match value {
            AttributeValue::Int(number) => Self::Int(CelInt::from(*number)),
            AttributeValue::Bool(truth) => Self::Bool(CelBool::from(*truth)),
            AttributeValue::String(text) => Self::Text(CelString::from(text.clone())),
            AttributeValue::Version(version) => Self::Version(SemverVal(version.clone())),
            AttributeValue::Ints(items) => list(items, |n| Box::new(CelInt::from(*n))),
            AttributeValue::Bools(items) => list(items, |b| Box::new(CelBool::from(*b))),
            AttributeValue::Strings(items) => list(items, |s| Box::new(CelString::from(s.clone()))),
            AttributeValue::Versions(items) => list(items, |v| Box::new(SemverVal(v.clone()))),
        }
    }
}

/// A map with text keys, sorted, that a lookup borrows from.
#[derive(Debug, Clone)]
pub(crate) struct Map<V>(Vec<(CelString<'static>, V)>);

impl<V> Default for Map<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<V> Map<V> {
    fn find(&self, key: &str) -> Option<&V> {
        let index = self.0.binary_search_by(|(k, _)| k.inner().cmp(key)).ok()?;
        self.0.get(index).map(|(_, value)| value)
    }

    fn entry(&mut self, key: &str) -> &mut V
    where
        V: Default,
    {
        let index = match self.0.binary_search_by(|(k, _)| k.inner().cmp(key)) {
            Ok(index) => index,
            Err(index) => {
                self.0
                    .insert(index, (CelString::from(key.to_owned()), V::default()));
                index
            }
        };
        &mut self.0[index].1
    }
}

/// Attributes or capacities of one domain, by identifier.
#[derive(Debug, Clone, Default)]
pub(crate) struct Identifiers(Map<Option<Leaf>>);

/// Attributes or capacities by domain. Looking up an unknown domain yields an
/// empty map, while `in` answers honestly: both as in Kubernetes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Domains(Map<Identifiers>);

static NO_IDENTIFIERS: Identifiers = Identifiers(Map(Vec::new()));

impl Domains {
    /// Adds a value under a name with or without a domain; a name without one
    /// belongs to the driver's.
    pub(crate) fn insert(&mut self, name: &str, driver: &str, leaf: Leaf) {
        let (domain, identifier) = name.split_once('/').unwrap_or((driver, name));
        *self.0.entry(domain).0.entry(identifier) = Some(leaf);
    }
}

fn text_key(key: &dyn Val) -> Result<&str, ExecutionError> {
    key.downcast_ref::<CelString<'_>>()
        .map(CelString::inner)
        .ok_or_else(|| ExecutionError::UnexpectedType {
            got: key.get_type().name().to_owned(),
            want: "string".to_owned(),
        })
}

struct Keys<'b, V>(std::slice::Iter<'b, (CelString<'static>, V)>);

impl<'b, 'v, V> ValIterator<'b, 'v> for Keys<'b, V> {
    fn next(&mut self) -> Option<&'b (dyn Val + 'v)> {
        self.0.next().map(|(key, _)| key as &'b (dyn Val + 'v))
    }
}

/// What [`Domains`] and [`Identifiers`] have in common: all but the lookup.
macro_rules! text_map {
    ($map:ident) => {
        impl Container for $map {
            fn contains(&self, key: &dyn Val) -> Result<bool, ExecutionError> {
                Ok(text_key(key).is_ok_and(|key| self.0.find(key).is_some()))
            }
        }

        impl Iterable for $map {
            fn iter<'b, 'v>(&'b self) -> Box<dyn ValIterator<'b, 'v> + 'b>
            where
                Self: 'v,
            {
                Box::new(Keys(self.0.0.iter()))
            }
        }

        impl Sizer for $map {
            fn size(&self) -> CelInt {
                CelInt::from(i64::try_from(self.0.0.len()).unwrap_or(i64::MAX))
            }
        }

        impl StaticVal for $map {}

        impl Val for $map {
            fn get_type(&self) -> &Type {
                &MAP_TYPE
            }

            fn cel_type() -> &'static Type {
                &MAP_TYPE
            }

            fn as_container(&self) -> Option<&dyn Container> {
                Some(self)
            }

            fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
            where
                Self: 'v,
            {
                Some(self)
            }

            fn into_indexer<'v>(self: Box<Self>) -> Option<Box<dyn Indexer + 'v>>
            where
                Self: 'v,
            {
                Some(self)
            }

            fn as_iterable<'b, 'v>(&'b self) -> Option<&'b (dyn Iterable + 'v)>
            where
                Self: 'v,
            {
                Some(self)
            }

            fn as_sizer(&self) -> Option<&dyn Sizer> {
                Some(self)
            }

            fn equals(&self, other: &dyn Val) -> bool {
                other.downcast_ref::<Self>().is_some_and(|other| {
                    self.0.0.len() == other.0.0.len()
                        && self
                            .0
                            .0
                            .iter()
                            .zip(&other.0.0)
                            .all(|((a, x), (b, y))| a == b && x.same(y))
                })
            }

            fn as_any(&self) -> Option<&dyn std::any::Any> {
                Some(self)
            }

            fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
            where
                Self: 'v,
            {
                Box::new(self.clone())
            }
        }
    };
}

/// Equality of what a text map holds.
trait Same {
    fn same(&self, other: &Self) -> bool;
}

impl Same for Identifiers {
    fn same(&self, other: &Self) -> bool {
        self.equals(other)
    }
}

impl Same for Option<Leaf> {
    fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Some(a), Some(b)) => a.as_val().equals(b.as_val()),
            (None, None) => true,
            _ => false,
        }
    }
}

text_map!(Domains);
text_map!(Identifiers);

impl Indexer for Domains {
    fn get<'b, 'v>(&'b self, key: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let identifiers = self.0.find(text_key(key)?).unwrap_or(&NO_IDENTIFIERS);
        Ok(CowVal::Borrowed(identifiers))
    }

    fn steal<'v>(self: Box<Self>, key: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(self.get(key)?.into_owned())
    }
}

impl Indexer for Identifiers {
    fn get<'b, 'v>(&'b self, key: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let key = text_key(key)?;
        match self.0.find(key) {
            Some(Some(leaf)) => Ok(CowVal::Borrowed(leaf.as_val())),
            _ => Err(ExecutionError::no_such_key(key)),
        }
    }

    fn steal<'v>(self: Box<Self>, key: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(self.get(key)?.into_owned())
    }
}

impl StaticVal for DeviceVal {}

impl Val for DeviceVal {
    fn get_type(&self) -> &Type {
        &DEVICE_TYPE
    }

    fn cel_type() -> &'static Type {
        &DEVICE_TYPE
    }

    fn equals(&self, other: &dyn Val) -> bool {
        // There is only one device in an evaluation.
        other.downcast_ref::<Self>().is_some()
    }

    fn as_indexer<'b, 'v>(&'b self) -> Option<&'b (dyn Indexer + 'v)>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn into_indexer<'v>(self: Box<Self>) -> Option<Box<dyn Indexer + 'v>>
    where
        Self: 'v,
    {
        Some(self)
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
    where
        Self: 'v,
    {
        Box::new(self.clone())
    }
}

impl Indexer for DeviceVal {
    fn get<'b, 'v>(&'b self, key: &dyn Val) -> Result<CowVal<'b, 'v>, ExecutionError>
    where
        Self: 'v,
    {
        let field: &dyn Val = match text_key(key)? {
            "driver" => &self.0.driver,
            "allowMultipleAllocations" => &self.0.allow_multiple_allocations,
            "attributes" => &self.0.attributes,
            "capacity" => &self.0.capacity,
            other => return Err(ExecutionError::no_such_key(other)),
        };
        Ok(CowVal::Borrowed(field))
    }

    fn steal<'v>(self: Box<Self>, key: &dyn Val) -> Result<Box<dyn Val + 'v>, ExecutionError>
    where
        Self: 'v,
    {
        Ok(self.get(key)?.into_owned())
    }
}

/// A value that can only be compared for equality and handed to functions.
macro_rules! opaque {
    ($val:ident, $type:ident) => {
        impl StaticVal for $val {}

        impl Val for $val {
            fn get_type(&self) -> &Type {
                &$type
            }

            fn cel_type() -> &'static Type {
                &$type
            }

            fn equals(&self, other: &dyn Val) -> bool {
                other
                    .downcast_ref::<Self>()
                    .is_some_and(|other| self.0 == other.0)
            }

            fn as_any(&self) -> Option<&dyn std::any::Any> {
                Some(self)
            }

            fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v>
            where
                Self: 'v,
            {
                Box::new(self.clone())
            }
        }
    };
}

opaque!(QuantityVal, QUANTITY_TYPE);
opaque!(SemverVal, SEMVER_TYPE);
