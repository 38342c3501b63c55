//! A request as policies see it: past the gate, with its client and the readings of its path.

use super::request_validation::{self, RequestTarget, RequestValidationError};
use crate::clock;
use crate::policy::client::ClientIdentity;
use crate::policy::jwt::{RequestToken, TokenFault};
use crate::policy::path::{PathFault, PathInterpretations};
use crate::policy::{Facts, PolicyTable};
use crate::tls::CertificateSubject;
use http::request;
use std::net::IpAddr;

/// What is known of a request before it is decided. Owns its texts, so that the head may go on changing.
#[derive(Debug)]
pub struct InboundRequest {
    pub(in crate::proxy) target: RequestTarget,
    pub(in crate::proxy) client: ClientIdentity,
    paths: PathInterpretations,
    token: RequestToken,
}

/// Why a request is refused before any policy sees it. The text is public.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboundRequestError {
    #[error(transparent)]
    Validation(#[from] RequestValidationError),
    #[error(transparent)]
    Path(#[from] PathFault),
    #[error("the header of the token occurs more than once")]
    RepeatedTokenHeader,
}

impl InboundRequest {
    /// Lets a request through the gate, which changes its head, and reads what policies need.
    ///
    /// # Errors
    /// An [`InboundRequestError`] for a request that we and the upstream might read differently.
    pub fn from_parts(
        parts: &mut request::Parts,
        peer: IpAddr,
        table: &PolicyTable,
    ) -> Result<Self, InboundRequestError> {
        let target = request_validation::validate_request(parts, &|name| table.reads_header(name))?;
        let client = ClientIdentity::identify(peer, &parts.headers, &table.client);
        let paths = PathInterpretations::parse(target.path(), &table.path)?;
        let token = match table.token_reader() {
            // A second one could hide the first from a policy, and not from the upstream.
            Some(reader) if reader.has_duplicate_header(&parts.headers) => {
                return Err(InboundRequestError::RepeatedTokenHeader);
            }
            Some(reader) => RequestToken::new(Some(reader), clock::unix_time_s()),
            None => RequestToken::default(),
        };
        Ok(Self {
            target,
            client,
            paths,
            token,
        })
    }

    /// What policies may know; `parts` are those that were read, `client_cert` is what the peer has shown.
    pub fn facts<'a>(
        &'a self,
        parts: &'a request::Parts,
        client_cert: Option<&'a CertificateSubject>,
    ) -> Facts<'a> {
        Facts {
            method: &parts.method,
            host: self.target.host(),
            paths: &self.paths,
            query: self.target.query(),
            headers: &parts.headers,
            client_ip: self.client.ip,
            token: &self.token,
            client_cert,
            descriptor: None,
        }
    }

    /// What is still of use when it is decided. The rest may be large: a hostile path has many readings.
    pub(in crate::proxy) fn into_target_and_client(self) -> (RequestTarget, ClientIdentity) {
        (self.target, self.client)
    }

    /// Why the request's token was not believed, if a policy asked.
    pub fn token_error(&self) -> Option<TokenFault> {
        self.token.fault()
    }
}
