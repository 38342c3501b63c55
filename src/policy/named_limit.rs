//! Limits with names, and where a request states the amount of one.

use super::key_part::KeyPart;
use super::path;
use crate::limiter::{Algorithm, Limit, LimitName};
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

/// Where the amount of a limit comes from (`requests_from`). The limit's own amount is the default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmountSource {
    /// A claim, a header, which is read only from a trusted proxy, or a field of the certificate.
    pub field: KeyPart,
    /// Larger amounts become this one.
    pub max: u64,
    /// The burst of a token bucket follows the amount, because the limit has no own one.
    pub sets_burst: bool,
}

impl AmountSource {
    /// Parses a field that no client can choose: `jwt:CLAIM`, `header:NAME`, `client_cert:san` or
    /// `client_cert:cn`.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse_field(text: &str) -> Result<KeyPart, String> {
        let kind = text.split(':').next().unwrap_or_default();
        match KeyPart::parse(text, &path::Settings::DEFAULT) {
            result if matches!(kind, "jwt" | "header") => result,
            Ok(part @ (KeyPart::ClientCertSan | KeyPart::ClientCertCn)) => Ok(part),
            _ => Err("expected jwt:CLAIM, header:NAME (from client.trusted_proxies), client_cert:san or client_cert:cn: a client chooses everything else".to_owned()),
        }
    }

    /// The limit with an amount, at most `max`.
    pub(super) fn apply_amount(&self, limit: &Limit, amount: u64) -> Limit {
        let requests = amount.min(self.max);
        let algorithm = match limit.algorithm {
            Algorithm::TokenBucket { warm_up_us, .. } if self.sets_burst => {
                Algorithm::TokenBucket {
                    burst: requests,
                    warm_up_us,
                }
            }
            algorithm => algorithm,
        };
        Limit {
            requests,
            algorithm,
            ..*limit
        }
    }
}
