//! A validated request as policies see it: target, client, path interpretations and token.

use http::{HeaderName, Uri, request};
use std::net::IpAddr;

use super::header_lines::is_client_cert_field;
use super::headers::remove_untrusted_client_cert;
use super::request_validation::{self, RequestTarget, RequestValidationError};
use crate::clock;
use crate::policy::client::ClientAddress;
use crate::policy::jwt::{RequestToken, TokenError};
use crate::policy::path::{self, ForwardedPath, PathError, PathInterpretations};
use crate::policy::{BodyFacts, Facts, HeaderValueError, PolicyTable};
use crate::tls::CertificateSubject;

/// Request properties for policies, except the headers. The properties are owned, so that the
/// request head can still change.
#[derive(Debug)]
pub struct InboundRequest {
    pub(crate) target: RequestTarget,
    pub(crate) client: ClientAddress,
    paths: PathInterpretations,
    token: RequestToken,
}

/// Reason why a request is rejected before any policy sees it. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboundRequestError {
    #[error(transparent)]
    Validation(#[from] RequestValidationError),
    #[error(transparent)]
    Path(#[from] PathError),
    #[error(transparent)]
    HeaderValue(#[from] HeaderValueError),
    #[error("the request has more than one header with a token; expected one")]
    RepeatedTokenHeader,
    #[error("the header with the token has several words or elements; expected one token")]
    AmbiguousToken,
}

impl InboundRequest {
    /// Validates a request, rewrites its head for the upstream and reads the properties for
    /// policies. `forward` is the path that the upstream will receive.
    ///
    /// # Errors
    /// Returns an [`InboundRequestError`] for a request that the proxy and the upstream could
    /// interpret differently.
    pub fn validate_and_rewrite(
        parts: &mut request::Parts,
        peer: IpAddr,
        table: &PolicyTable,
        forward: ForwardedPath,
    ) -> Result<Self, InboundRequestError> {
        let mut target = request_validation::validate_and_rewrite_request(parts, &|name| {
            *name == table.mark_header || table.reads_header(name)
        })?;
        if table.has_look_alike(&parts.headers) {
            return Err(RequestValidationError::AmbiguousHeaderName.into());
        }
        let client = ClientAddress::identify(peer, &parts.headers, &table.client);
        // Only tidegate marks requests and states certificates: policies and the upstream never see
        // what a client writes there. The names are compared first: without such a header, this is
        // cheaper than lookups.
        let is_own_header =
            |name: &HeaderName| *name == table.mark_header || is_client_cert_field(name);
        if parts.headers.keys().any(is_own_header) {
            parts.headers.remove(&table.mark_header);
            remove_untrusted_client_cert(&mut parts.headers, &client, table);
        }
        table.check_header_values(&parts.headers)?;
        let path_settings = path::Settings {
            forward,
            ..table.path
        };
        let paths = PathInterpretations::parse(target.path(), &path_settings)?;
        if forward == ForwardedPath::Normalized
            && let Some(path) = path::normalize_forwarded_path(target.path(), &path_settings)
        {
            target.replace_path(&path)?;
            parts.uri = Uri::from(target.path_and_query.clone());
        }
        let token = match &table.token_reader {
            // The policy could read one of two tokens and the upstream the other.
            Some(reader) if reader.has_duplicate_header(&parts.headers) => {
                return Err(InboundRequestError::RepeatedTokenHeader);
            }
            Some(reader) if reader.has_ambiguous_token(&parts.headers) => {
                return Err(InboundRequestError::AmbiguousToken);
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

    /// Returns the facts for policies. `parts` is the head that
    /// [`InboundRequest::validate_and_rewrite`] has rewritten; `client_cert` is the subject of the
    /// peer's TLS certificate.
    pub fn facts<'a>(
        &'a self,
        parts: &'a request::Parts,
        client_cert: Option<&'a CertificateSubject>,
        body: Option<&'a BodyFacts>,
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
            has_joined_headers: false,
            is_peer_trusted: self.client.is_peer_trusted,
            body,
            unreadable_holds: true,
            descriptor: None,
        }
    }

    /// Returns why the token is invalid; `None` if it is valid or no policy has read it.
    pub fn token_error(&self) -> Option<TokenError> {
        self.token.error()
    }
}
