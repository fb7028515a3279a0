//! Which device node opens which MIG instance.
//!
//! In: the text of `<proc>/driver/nvidia-caps/mig-minors`. Out: the minor numbers of
//! `/dev/nvidia-caps/nvidia-cap<minor>`. Never: a file.

use std::collections::BTreeMap;

/// The minor numbers of the MIG capabilities of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigMinors(BTreeMap<String, u32>);

/// A line that is not `name minor`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "mig-minors, line {line}: {text:?} is not a capability and its minor number; \
         read it from <proc>/driver/nvidia-caps/mig-minors"
)]
pub struct MigMinorsError {
    /// The line, counted from 1.
    pub line: usize,
    /// What it says.
    pub text: String,
}

impl MigMinors {
    /// Reads the driver's list.
    ///
    /// # Errors
    /// When a line is not a capability and a number.
    pub fn parse(text: &str) -> Result<Self, MigMinorsError> {
        let mut minors = BTreeMap::new();
        for (index, line) in text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
        {
            let entry = line.trim().split_once(char::is_whitespace);
            let (name, minor) = entry
                .and_then(|(name, minor)| Some((name, minor.trim().parse().ok()?)))
                .ok_or_else(|| MigMinorsError {
                    line: index + 1,
                    text: line.to_owned(),
                })?;
            minors.insert(name.to_owned(), minor);
        }
        Ok(Self(minors))
    }

    /// The minors that open a compute instance: (its GPU instance's, its own). A process
    /// needs both, and the GPU's own device node. `gpu` is the GPU's minor number.
    #[must_use]
    pub fn access(&self, gpu: u32, gpu_instance: u32, compute_instance: u32) -> Option<(u32, u32)> {
        let gi = format!("gpu{gpu}/gi{gpu_instance}");
        let of = |name: String| self.0.get(&name).copied();
        Some((
            of(format!("{gi}/access"))?,
            of(format!("{gi}/ci{compute_instance}/access"))?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n\
                        gpu1/gi9/access 219\ngpu1/gi9/ci0/access 220\n";

    #[test]
    fn access_minors_are_those_of_the_gpus_minor_number_and_both_instances() {
        let minors = MigMinors::parse(TEXT).unwrap();
        assert_eq!(minors.access(1, 9, 0), Some((219, 220)));
        assert_eq!(minors.access(0, 0, 0), Some((3, 4)));
    }

    #[test]
    fn an_instance_without_a_minor_has_no_access() {
        let minors = MigMinors::parse(TEXT).unwrap();
        assert_eq!(minors.access(0, 0, 1), None);
        assert_eq!(minors.access(2, 0, 0), None);
    }

    #[test]
    fn a_line_that_is_no_capability_is_named() {
        let error = MigMinors::parse("config 1\ngpu0/gi0/access\n").unwrap_err();
        assert_eq!(error.line, 2);
        assert!(error.to_string().contains("gpu0/gi0/access"), "{error}");
    }
}
