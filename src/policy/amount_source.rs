//! Where the amount of a limit comes from, if the request states it: a claim, a header of a trusted
//! proxy or a field of the client certificate.

use super::jwt::ClaimName;
use crate::limiter::{Algorithm, Limit};
use http::HeaderName;
use std::fmt;

/// Where the amount of a limit comes from (`requests_from`). The limit's own amount is the default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmountSource {
    pub field: AmountField,
    /// Larger amounts become this one.
    pub max: u64,
    /// The burst of a token bucket follows the amount, because the limit has no own one.
    pub sets_burst: bool,
}

/// A field of a request that no client can choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AmountField {
    /// A claim of a verified token.
    Claim(ClaimName),
    /// A header, read only from a trusted proxy.
    Header(HeaderName),
    ClientCertSan,
    ClientCertCn,
}

impl AmountSource {
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

impl AmountField {
    /// Parses `jwt:CLAIM`, `header:NAME`, `client_cert:san` or `client_cert:cn`.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        match (kind, name) {
            ("client_cert", "san") => Ok(Self::ClientCertSan),
            ("client_cert", "cn") => Ok(Self::ClientCertCn),
            ("jwt" | "header", "") => Err(format!("{kind} needs a name, as in \"{kind}:NAME\"")),
            ("jwt", name) => ClaimName::parse(name).map(Self::Claim),
            ("header", name) => HeaderName::from_bytes(name.as_bytes())
                .map(Self::Header)
                .map_err(|error| format!("{name:?}: {error}")),
            _ => Err("expected jwt:CLAIM, header:NAME (from client.trusted_proxies), client_cert:san or client_cert:cn: a client chooses everything else".to_owned()),
        }
    }
}

impl fmt::Display for AmountField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(name) => write!(f, "claim {name}"),
            Self::Header(name) => write!(f, "header {name}"),
            Self::ClientCertSan => f.write_str("client certificate's SAN"),
            Self::ClientCertCn => f.write_str("client certificate's CN"),
        }
    }
}
