//! Envoy's rate-limit service (`envoy.service.ratelimit.v3`): calls in, policies' decisions out.
//!
//! A call brings descriptors instead of a request. All of them are decided in one question; what the store can't tell
//! is UNAVAILABLE, and then Envoy does what its own `failure_mode_deny` says.

#[allow(
    dead_code,
    unreachable_pub,
    clippy::all,
    reason = "written by `make proto`, with what only others need"
)]
mod messages;

use super::access::Entry;
use super::body::{RequestBody, ResponseBody};
use super::fields;
use super::grpc::{self, Code, Failure};
use super::server::Peer;
use super::service::{Service, answer};
use crate::enforcer::{Called, Outcome, Reported, Status, Verdict};
use crate::policy::{Descriptor, Fields, Reject};
use crate::telemetry::metrics::{Call, Shard};
use crate::trace::{Context, TraceId};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use messages::rate_limit_response::{self as response, rate_limit::Unit};
use messages::{
    Duration, HealthCheckRequest, HealthCheckResponse, RateLimitDescriptor, RateLimitRequest,
    RateLimitResponse, UInt32Value, health_check_response::ServingStatus,
};
use tokio::time::Instant;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
/// Whose health may be asked for: the whole server's, the service's, and that by the name that Envoy's own server has.
const HEALTH_OF: [&str; 3] = [
    "",
    "envoy.service.ratelimit.v3.RateLimitService",
    "ratelimit",
];

/// The largest call. Envoy's have some hundred bytes.
pub const MAX_MESSAGE_BYTES: u64 = 64 << 10;
/// Descriptors of a call, and entries of one: each is a key that Redis is asked about at the same time.
const MAX_DESCRIPTORS: usize = 64;
const MAX_ENTRIES: usize = 64;

const SECOND_US: u64 = 1_000_000;

impl Service {
    /// Answers a call.
    pub(super) async fn rls(
        &self,
        request: Request<RequestBody>,
        peer: &Peer,
    ) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let (parts, body) = request.into_parts();
        if let Some(response) = grpc::not_a_call(&parts) {
            self.shard.call(Call::Invalid);
            tracing::debug!(status = %response.status(), peer = %peer.addr, "that was no call");
            body.discard();
            return response;
        }
        let answer = match parts.uri.path() {
            SHOULD_RATE_LIMIT => {
                let trace = Context::of(&parts.headers).map(|context| context.trace);
                let mut counted = Counted {
                    shard: &self.shard,
                    call: Call::GivenUp,
                };
                let answer = self.should_rate_limit(body, peer, arrived, trace).await;
                counted.call = match &answer {
                    Ok((call, _)) => *call,
                    Err(Failure(Code::Unavailable, _)) => Call::Unavailable,
                    Err(Failure(Code::Cancelled, _)) => Call::GivenUp,
                    Err(_) => Call::Invalid,
                };
                if let Err(Failure(code, why)) = answer {
                    tracing::debug!(?code, why, peer = %peer.addr, "a call failed");
                }
                answer.map(|(_, message)| message)
            }
            HEALTH => self.health(body).await,
            _ => Err(Failure(Code::Unimplemented, "there is no such method")),
        };
        grpc::reply(answer)
    }

    /// Who is about to end takes calls, and tells those who choose among several to send no more.
    async fn health(&self, body: RequestBody) -> Result<Bytes, Failure> {
        let asked: HealthCheckRequest = grpc::read(body).await?;
        if !HEALTH_OF.contains(&&*asked.service) {
            return Err(Failure(Code::NotFound, "there is no such service"));
        }
        let status = if self.is_ending() {
            ServingStatus::NotServing
        } else {
            ServingStatus::Serving
        };
        Ok(grpc::framed(&HealthCheckResponse {
            status: status.into(),
        }))
    }

    async fn should_rate_limit(
        &self,
        body: RequestBody,
        peer: &Peer,
        arrived: Instant,
        trace: Option<TraceId>,
    ) -> Result<(Call, Bytes), Failure> {
        let call: RateLimitRequest = grpc::read(body).await?;
        check(&call)?;
        let entries = call.descriptors.iter().map(entries).collect::<Vec<_>>();
        let descriptors = call.descriptors.iter().zip(&entries);
        let descriptors = descriptors
            .map(|(told, entries)| descriptor(&call, told, entries))
            .collect::<Result<Vec<_>, _>>()?;
        let rules = self.enforcer.rules();
        let called = self
            .enforcer
            .decide_call(&rules, &descriptors, arrived)
            .await;
        self.shard.answer(answer(&called.verdict));
        self.shard.unmet(
            called
                .statuses
                .iter()
                .filter(|status| !status.is_met)
                .count(),
        );
        self.log_call(&called, &descriptors, peer, arrived, trace);
        if let Outcome::Unavailable { .. } = called.verdict.outcome {
            return Err(Failure(Code::Unavailable, "the store gave no answer"));
        }
        let over = called.verdict.outcome.is_over_limit();
        let call = if over { Call::OverLimit } else { Call::Ok };
        Ok((call, grpc::framed(&told(&called, rules.table.fields))))
    }

    fn log_call(
        &self,
        Called { verdict, statuses }: &Called<'_>,
        descriptors: &[Descriptor<'_>],
        peer: &Peer,
        arrived: Instant,
        trace: Option<TraceId>,
    ) {
        let (status, policy) = match &verdict.outcome {
            Outcome::Forward => (StatusCode::OK, None),
            Outcome::Limited(limited) => (StatusCode::TOO_MANY_REQUESTS, Some(limited.policy)),
            Outcome::Denied { policy, .. } | Outcome::BadKey { policy, .. } => {
                (StatusCode::TOO_MANY_REQUESTS, Some(*policy))
            }
            Outcome::Unavailable { policy, .. } => (StatusCode::SERVICE_UNAVAILABLE, Some(*policy)),
        };
        let over = statuses
            .iter()
            .zip(descriptors)
            .find(|(status, _)| status.is_over);
        let shown = over
            .map(|(_, descriptor)| descriptor)
            .or(descriptors.first());
        self.access.write(&Entry {
            method: "RLS",
            host: shown.map_or("", |descriptor| descriptor.domain),
            path: &shown.map(Descriptor::text).unwrap_or_default(),
            head: arrived.elapsed(),
            decision: answer(verdict).word(),
            policy,
            shadow_rejected: &verdict.shadow_rejected,
            limits: &verdict.limits,
            source: verdict.source,
            decided: verdict.at.map(|at| at - arrived),
            trace,
            ..Entry::unread(peer.addr.ip(), status)
        });
    }
}

/// Counts a call when it has ended, also if that is because its caller has left.
struct Counted<'s> {
    shard: &'s Shard,
    call: Call,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.shard.call(self.call);
    }
}

/// What a call has to have.
fn check(call: &RateLimitRequest) -> Result<(), Failure> {
    let invalid = |why| Err(Failure(Code::InvalidArgument, why));
    if call.domain.is_empty() {
        return invalid("the domain is missing");
    }
    if call.descriptors.is_empty() {
        return invalid("there is no descriptor");
    }
    if call.descriptors.len() > MAX_DESCRIPTORS {
        return invalid("there are more than 64 descriptors");
    }
    if call
        .descriptors
        .iter()
        .any(|descriptor| descriptor.entries.len() > MAX_ENTRIES)
    {
        return invalid("a descriptor has more than 64 entries");
    }
    if call
        .descriptors
        .iter()
        .any(|descriptor| descriptor.is_negative_hits)
    {
        return invalid("hits are not given back");
    }
    Ok(())
}

fn entries(told: &RateLimitDescriptor) -> Vec<(&str, &str)> {
    told.entries
        .iter()
        .map(|entry| (&*entry.key, &*entry.value))
        .collect()
}

fn descriptor<'a>(
    call: &'a RateLimitRequest,
    told: &RateLimitDescriptor,
    entries: &'a [(&'a str, &'a str)],
) -> Result<Descriptor<'a>, Failure> {
    // A call can't say 0, a descriptor can.
    let hits = told
        .hits_addend
        .as_ref()
        .map_or(u64::from(call.hits_addend.max(1)), |hits| hits.value);
    let instead = match &told.limit {
        None => None,
        Some(limit) => {
            let per_s = period_s(limit.unit()).ok_or(Failure(
                Code::InvalidArgument,
                "a limit without a unit of time",
            ))?;
            Some((limit.requests_per_unit, per_s * SECOND_US))
        }
    };
    Ok(Descriptor::new(&call.domain, entries, hits, instead))
}

fn period_s(unit: Unit) -> Option<u64> {
    const DAY_S: u64 = 86_400;
    Some(match unit {
        Unit::Unknown => return None,
        Unit::Second => 1,
        Unit::Minute => 60,
        Unit::Hour => 3600,
        Unit::Day => DAY_S,
        Unit::Week => 7 * DAY_S,
        // As the service does that Envoy's authors wrote.
        Unit::Month => 30 * DAY_S,
        Unit::Year => 365 * DAY_S,
    })
}

fn told(Called { verdict, statuses }: &Called<'_>, fields: Fields) -> RateLimitResponse {
    let code = |over| {
        if over {
            response::Code::OverLimit
        } else {
            response::Code::Ok
        }
    };
    let (headers, body) = reply(verdict, fields);
    RateLimitResponse {
        overall_code: code(verdict.outcome.is_over_limit()).into(),
        statuses: statuses
            .iter()
            .map(|status| standing(status, code(status.is_over), verdict.now_us))
            .collect(),
        response_headers_to_add: headers,
        raw_body: body,
    }
}

fn standing(status: &Status<'_>, code: response::Code, now_us: u64) -> response::DescriptorStatus {
    let Some(reported) = &status.tightest else {
        return response::DescriptorStatus {
            code: code.into(),
            ..Default::default()
        };
    };
    let reset_us = fields::reset_at_us(reported, now_us).saturating_sub(now_us);
    response::DescriptorStatus {
        code: code.into(),
        current_limit: Some(current_limit(reported)),
        limit_remaining: u32::try_from(reported.standing.remaining).unwrap_or(u32::MAX),
        duration_until_reset: Some(Duration {
            seconds: i64::try_from(reset_us / SECOND_US).unwrap_or(i64::MAX),
            nanos: i32::try_from(reset_us % SECOND_US * 1000).unwrap_or_default(),
        }),
    }
}

fn current_limit(reported: &Reported<'_>) -> response::RateLimit {
    let limit = reported.limit.limit;
    // The largest that fits; older Envoys know no multiplier.
    let units = [Unit::Day, Unit::Hour, Unit::Minute, Unit::Second];
    let fitting = units.into_iter().find_map(|unit| {
        let unit_us = period_s(unit)? * SECOND_US;
        limit
            .per_us
            .is_multiple_of(unit_us)
            .then_some((unit, limit.per_us / unit_us))
    });
    let (unit, times) = fitting.unwrap_or((Unit::Unknown, 1));
    let times = u32::try_from(times).ok().filter(|times| *times > 1);
    response::RateLimit {
        name: (*reported.limit.name).to_owned(),
        requests_per_unit: u32::try_from(limit.requests).unwrap_or(u32::MAX),
        unit: unit.into(),
        unit_multiplier: times.map(|value| UInt32Value { value }),
    }
}

/// What Envoy is to add to its answer, and what it answers with if it refuses.
fn reply(verdict: &Verdict<'_>, fields: Fields) -> (Vec<messages::HeaderValue>, Bytes) {
    let mut headers = HeaderMap::new();
    fields::write(verdict, fields, &mut headers);
    let reject = match &verdict.outcome {
        Outcome::Limited(limited) => {
            if let Some(seconds) = limited.retry.header_s() {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            }
            limited.reject
        }
        Outcome::Denied { reject, .. } => *reject,
        _ => None,
    };
    if let Some(Reject {
        body,
        content_type,
        headers: more,
        ..
    }) = reject
    {
        if !body.is_empty() {
            headers.insert(header::CONTENT_TYPE, content_type.clone());
        }
        more.iter().for_each(|(name, value)| {
            headers.append(name, value.clone());
        });
    }
    let added = headers.iter().filter_map(|(name, value)| {
        Some(messages::HeaderValue {
            key: name.to_string(),
            value: value.to_str().ok()?.to_owned(),
        })
    });
    (
        added.collect(),
        reject.map(|reject| reject.body.clone()).unwrap_or_default(),
    )
}
