//! Samples of two sides, as a table and as JSON.
//!
//! In: raw samples. Out: percentiles by nearest rank, and the ratio of the first side to the second.
//! Nothing is dropped, smoothed or averaged here.

use std::fmt::Write as _;

use serde::Serialize;

/// One run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    machine: String,
    started: String,
    load_at_start: String,
    load_at_end: String,
    comparisons: Vec<Comparison>,
}

/// What one name of `hack/bench` measured.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) title: &'static str,
    /// What is compared: the first to the second.
    pub(crate) sides: [&'static str; 2],
    pub(crate) rows: Vec<Row>,
    /// What a reader has to know to judge the figures.
    pub(crate) notes: Vec<String>,
}

/// One measurement of both sides.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// The situation, such as `one after the other, 0 standing claims`.
    pub(crate) what: String,
    /// What is measured in it, such as `prepare`.
    pub(crate) measure: &'static str,
    pub(crate) unit: &'static str,
    /// Which figures the table shows.
    pub(crate) shown: &'static [Figure],
    /// Each side's samples; a side without any was not measured.
    pub(crate) samples: [Vec<f64>; 2],
}

/// A figure that stands for many samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Figure {
    P50,
    P90,
    P99,
    Mean,
}

impl Figure {
    fn name(self) -> &'static str {
        match self {
            Self::P50 => "p50",
            Self::P90 => "p90",
            Self::P99 => "p99",
            Self::Mean => "mean",
        }
    }

    /// The figure of `samples`, or nothing if there are none.
    pub(crate) fn of(self, samples: &[f64]) -> Option<f64> {
        match self {
            Self::P50 => percentile(samples, 50),
            Self::P90 => percentile(samples, 90),
            Self::P99 => percentile(samples, 99),
            #[allow(clippy::cast_precision_loss)] // far fewer than 2^52
            Self::Mean if !samples.is_empty() => {
                Some(samples.iter().sum::<f64>() / samples.len() as f64)
            }
            Self::Mean => None,
        }
    }
}

/// The smallest sample that at least `percent` of all samples do not exceed.
fn percentile(samples: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

impl Report {
    pub(crate) fn new(machine: String) -> Self {
        Self {
            machine,
            started: jiff::Timestamp::now().strftime("%F %H:%M UTC").to_string(),
            load_at_start: crate::machine::load().unwrap_or_default(),
            load_at_end: String::new(),
            comparisons: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, comparison: Comparison) {
        self.comparisons.push(comparison);
    }

    pub(crate) fn finish(&mut self, load: String) {
        self.load_at_end = load;
    }

    /// The tables, and the line about the machine.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::new();
        for comparison in &self.comparisons {
            comparison.write(&mut text);
        }
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "Machine: {}; load average {} before, {} after; {}.",
            self.machine, self.load_at_start, self.load_at_end, self.started
        );
        text
    }
}

impl Comparison {
    fn write(&self, text: &mut String) {
        let [first, second] = self.sides;
        let _ = writeln!(text, "### {}\n", self.title);
        let _ = writeln!(
            text,
            "| | | {first} | {second} | ratio | n |\n|---|---|--:|--:|--:|--:|"
        );
        for row in &self.rows {
            for figure in row.shown {
                row.write(*figure, text);
            }
        }
        text.push('\n');
        for note in &self.notes {
            let _ = writeln!(text, "- {note}");
        }
        text.push('\n');
    }
}

impl Row {
    fn write(&self, figure: Figure, text: &mut String) {
        let [first, second] = [0, 1].map(|side: usize| figure.of(&self.samples[side]));
        let show = |value: Option<f64>| {
            value.map_or_else(
                || "–".to_owned(),
                |value| format!("{} {}", digits(value), self.unit),
            )
        };
        let ratio = first.zip(second).map_or_else(
            || "–".to_owned(),
            |(first, second)| format!("**{:.2}**", first / second),
        );
        let counts = self.samples.each_ref().map(Vec::len);
        let count = match counts {
            [first, second] if first == second => first.to_string(),
            [first, 0] => first.to_string(),
            [0, second] => second.to_string(),
            [first, second] => format!("{first}, {second}"),
        };
        let _ = writeln!(
            text,
            "| {} | {} {} | {} | {} | {ratio} | {count} |",
            self.what,
            self.measure,
            figure.name(),
            show(first),
            show(second),
        );
    }
}

/// Three significant digits or more.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_sample_and_not_between_two() {
        let samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(Figure::P50.of(&samples), Some(100.0));
        assert_eq!(Figure::P99.of(&samples), Some(198.0));
        assert_eq!(Figure::P99.of(&[3.0, 1.0]), Some(3.0));
        assert_eq!(Figure::P50.of(&[]), None);
        assert_eq!(Figure::Mean.of(&[1.0, 2.0]), Some(1.5));
    }

    #[test]
    fn a_row_shows_both_sides_and_the_ratio_of_the_first_to_the_second() {
        let row = Row {
            what: "idle".into(),
            measure: "resident",
            unit: "MiB",
            shown: &[Figure::P50],
            samples: [vec![10.0], vec![40.0, 50.0]],
        };
        let mut text = String::new();
        row.write(Figure::P50, &mut text);
        assert_eq!(
            text,
            "| idle | resident p50 | 10.0 MiB | 40.0 MiB | **0.25** | 1, 2 |\n"
        );
    }

    #[test]
    fn a_row_of_one_side_has_no_ratio() {
        let row = Row {
            what: "floor".into(),
            measure: "GET",
            unit: "ms",
            shown: &[Figure::P50],
            samples: [vec![1.25], vec![]],
        };
        let mut text = String::new();
        row.write(Figure::P50, &mut text);
        assert_eq!(text, "| floor | GET p50 | 1.25 ms | – | – | 1 |\n");
    }
}
