//! The response statuses that a policy with `count_when` counts.

use http::StatusCode;
use std::fmt;

/// A set of response statuses: single ones, and classes such as `4xx`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountedStatuses {
    /// The first and the last status of each entry.
    ranges: Vec<(u16, u16)>,
}

impl CountedStatuses {
    /// Adds a status such as `401`, or a class such as `4xx`.
    ///
    /// # Errors
    /// Returns a message that can follow "found …;".
    pub fn add_text(&mut self, text: &str) -> Result<(), String> {
        let range = match text.split_at_checked(1) {
            Some((class, "xx")) => class
                .parse()
                .ok()
                .filter(|class| (1..=5).contains(class))
                .map(|class: u16| (100 * class, 100 * class + 99)),
            _ => text
                .parse()
                .ok()
                .filter(|status| text.len() == 3 && (100..=599).contains(status))
                .map(|status: u16| (status, status)),
        };
        self.ranges.push(
            range.ok_or(
                "expected a status from 100 to 599, or a class such as \"4xx\"".to_owned(),
            )?,
        );
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub fn contains(&self, status: StatusCode) -> bool {
        let in_range = |(first, last): &(u16, u16)| (*first..=*last).contains(&status.as_u16());
        self.ranges.iter().any(in_range)
    }
}

impl fmt::Display for CountedStatuses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.ranges.iter().enumerate() {
            let separator = if index > 0 { ", " } else { "" };
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{}xx", first / 100)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_and_classes_are_parsed_and_matched() {
        let mut counted = CountedStatuses::default();
        for text in ["401", "5xx"] {
            counted.add_text(text).unwrap();
        }
        assert_eq!(counted.to_string(), "401, 5xx");
        for status in 100..=599 {
            let expected = status == 401 || status >= 500;
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(counted.contains(status), expected, "{status}");
        }
        for wrong in [
            "", "xx", "6xx", "0xx", "4XX", "4xxx", "99", "600", "0401", "+40", "é",
        ] {
            assert!(counted.add_text(wrong).is_err(), "{wrong}");
        }
    }
}
