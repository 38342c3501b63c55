//! A request as policies see it: past the gate, with its client and the readings of its path.

use super::gate::{self, GateFault, Target};
use crate::clock;
use crate::policy::client::Client;
use crate::policy::jwt::{Token, TokenFault};
use crate::policy::path::{PathFault, Readings};
use crate::policy::{Facts, PolicyTable};
use crate::tls::Subject;
use http::request;
use std::net::IpAddr;

/// What is known of a request before it is decided. Owns its texts, so that the head may go on changing.
#[derive(Debug)]
pub struct Inbound {
    pub(super) target: Target,
    pub(super) client: Client,
    paths: Readings,
    token: Token,
}

/// Why a request is refused before any policy sees it. The text is public.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InboundFault {
    #[error(transparent)]
    Gate(#[from] GateFault),
    #[error(transparent)]
    Path(#[from] PathFault),
    #[error("the header of the token occurs more than once")]
    TokenRepeated,
}

impl Inbound {
    /// Lets a request through the gate, which changes its head, and reads what policies need.
    ///
    /// # Errors
    /// An [`InboundFault`] for a request that we and the upstream might read differently.
    pub fn read(
        parts: &mut request::Parts,
        peer: IpAddr,
        table: &PolicyTable,
    ) -> Result<Self, InboundFault> {
        let target = gate::check(parts, &|name| table.reads_header(name))?;
        let client = Client::identify(peer, &parts.headers, &table.client);
        let paths = Readings::of(target.path(), &table.path)?;
        let token = match table.tokens() {
            // A second one could hide the first from a policy, and not from the upstream.
            Some(reader) if reader.is_ambiguous(&parts.headers) => {
                return Err(InboundFault::TokenRepeated);
            }
            Some(reader) => Token::new(Some(reader), clock::unix_s()),
            None => Token::default(),
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
        client_cert: Option<&'a Subject>,
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
    pub(super) fn into_rest(self) -> (Target, Client) {
        (self.target, self.client)
    }

    /// Why the request's token was not believed, if a policy asked.
    pub fn token_fault(&self) -> Option<TokenFault> {
        self.token.fault()
    }
}
