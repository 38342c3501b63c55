//! Where the amount of a limit comes from, if the request states it: a claim, a header of a trusted
//! proxy or a field of the client certificate.

use super::key_part::KeyPart;
use super::path;
use crate::limiter::{Algorithm, Limit};

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
