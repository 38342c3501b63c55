//! Limits with names.

use super::amount_source::AmountSource;
use crate::limiter::{Limit, LimitName};
use strum::{EnumString, IntoStaticStr, VariantNames};

/// A limit and its name in the rate-limit headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLimit {
    pub name: LimitName,
    /// The unit that is counted; `None` means requests.
    pub unit: Option<Box<str>>,
    pub limit: Limit,
    /// Where the request states the amount; `limit` then has the default.
    pub amount: Option<Box<AmountSource>>,
    /// Whether responses may have the limit: `report` of its policy.
    pub is_reported: bool,
    /// Of a concurrency limit: what ends a request.
    pub release: SlotRelease,
}

/// What ends a request in flight, so that its concurrency slot becomes free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames, IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum SlotRelease {
    /// The end of the response to the client, which may disconnect earlier.
    #[default]
    Response,
    /// The end of the upstream's response, whatever the client does.
    Upstream,
}

impl SlotRelease {
    /// The name in the configuration.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl NamedLimit {
    /// The capacity under the largest amount that a request may state.
    pub fn max_capacity(&self) -> u64 {
        let largest = |source: &AmountSource| source.apply_amount(&self.limit, source.max);
        let limit = self.amount.as_deref().map_or(self.limit, largest);
        limit.capacity()
    }
}
