//! Envoy's rate-limit service (`envoy.service.ratelimit.v3`): calls in, policies' decisions out.
//!
//! A call brings descriptors instead of a request. All of them are decided in one question; what the store can't tell
//! is UNAVAILABLE, and then Envoy does what its own `failure_mode_deny` says.

pub(in crate::proxy) mod grpc;
#[allow(
    dead_code,
    unreachable_pub,
    clippy::all,
    reason = "written by `make proto`, with what only others need"
)]
mod messages;

use super::server::peer::ConnectionPeer;
use super::service::{ProxyService, classify_verdict};
use crate::enforcer::{CallVerdict, DescriptorVerdict, ReportedLimit, RequestOutcome, Verdict};
use crate::policy::{Descriptor, RateLimitHeaderSettings, RejectResponse};
use crate::proxy::http::access_log::AccessLogEntry;
use crate::proxy::http::body::{RequestBody, ResponseBody};
use crate::proxy::http::rate_limit_headers;
use crate::proxy::rate_limit_service::grpc::{GrpcError, GrpcStatusCode};
use crate::telemetry::metrics::{RlsCallResult, WorkerMetrics};
use crate::telemetry::trace::{TraceContext, TraceId};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use messages::rate_limit_response::{self as response, rate_limit::Unit};
use messages::{
    Duration, HealthCheckRequest, HealthCheckResponse, RateLimitDescriptor, RateLimitRequest,
    RateLimitResponse, UInt32Value, health_check_response::ServingStatus,
};
use tokio::time::Instant;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// Whose health may be asked for: the whole server's, the service's, and that by the name that Envoy's own server has.
const HEALTH_SERVICES: [&str; 3] = [
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

impl ProxyService {
    /// Answers a call.
    pub(super) async fn answer_rate_limit_call(
        &self,
        request: Request<RequestBody>,
        peer: &ConnectionPeer,
    ) -> Response<ResponseBody> {
        let arrived = Instant::now();
        let (parts, body) = request.into_parts();
        if let Some(response) = grpc::reject_non_grpc(&parts) {
            self.metrics.record_rls_call(RlsCallResult::Invalid);
            tracing::debug!(status = %response.status(), peer = %peer.addr, "that was no call");
            body.discard();
            return response;
        }
        let answer = match parts.uri.path() {
            SHOULD_RATE_LIMIT => {
                let trace = TraceContext::from_headers(&parts.headers).map(|context| context.trace);
                let mut count_guard = RateLimitCallGuard {
                    shard: &self.metrics,
                    call: RlsCallResult::Cancelled,
                };
                let answer = self.should_rate_limit(body, peer, arrived, trace).await;
                count_guard.call = match &answer {
                    Ok((call, _)) => *call,
                    Err(GrpcError(GrpcStatusCode::Unavailable, _)) => RlsCallResult::Unavailable,
                    Err(GrpcError(GrpcStatusCode::Cancelled, _)) => RlsCallResult::Cancelled,
                    Err(_) => RlsCallResult::Invalid,
                };
                if let Err(GrpcError(code, why)) = answer {
                    tracing::debug!(?code, why, peer = %peer.addr, "a call failed");
                }
                answer.map(|(_, message)| message)
            }
            HEALTH_CHECK => self.check_health(body).await,
            _ => Err(GrpcError(
                GrpcStatusCode::Unimplemented,
                "there is no such method",
            )),
        };
        grpc::build_reply(answer)
    }

    /// Who is about to end takes calls, and tells those who choose among several to send no more.
    async fn check_health(&self, body: RequestBody) -> Result<Bytes, GrpcError> {
        let health_request: HealthCheckRequest = grpc::read_message(body).await?;
        if !HEALTH_SERVICES.contains(&&*health_request.service) {
            return Err(GrpcError(
                GrpcStatusCode::NotFound,
                "there is no such service",
            ));
        }
        let status = if self.is_shutting_down() {
            ServingStatus::NotServing
        } else {
            ServingStatus::Serving
        };
        Ok(grpc::frame_message(&HealthCheckResponse {
            status: status.into(),
        }))
    }

    async fn should_rate_limit(
        &self,
        body: RequestBody,
        peer: &ConnectionPeer,
        arrived: Instant,
        trace: Option<TraceId>,
    ) -> Result<(RlsCallResult, Bytes), GrpcError> {
        let call: RateLimitRequest = grpc::read_message(body).await?;
        validate_call(&call)?;
        let entries = call
            .descriptors
            .iter()
            .map(descriptor_entries)
            .collect::<Vec<_>>();
        let descriptors = call.descriptors.iter().zip(&entries);
        let descriptors = descriptors
            .map(|(message, entries)| build_descriptor(&call, message, entries))
            .collect::<Result<Vec<_>, _>>()?;
        let rules = self.enforcer.policy_snapshot();
        let called = self
            .enforcer
            .decide_call(&rules, &descriptors, arrived)
            .await;
        self.metrics
            .record_request_decision(classify_verdict(&called.verdict));
        self.metrics.record_unmatched_descriptors(
            called
                .statuses
                .iter()
                .filter(|status| !status.is_matched)
                .count(),
        );
        self.log_call(&called, &descriptors, peer, arrived, trace);
        if let RequestOutcome::Unavailable { .. } = called.verdict.outcome {
            return Err(GrpcError(
                GrpcStatusCode::Unavailable,
                "the store gave no answer",
            ));
        }
        let over = called.verdict.outcome.is_over_limit();
        let call = if over {
            RlsCallResult::OverLimit
        } else {
            RlsCallResult::Ok
        };
        Ok((
            call,
            grpc::frame_message(&build_response(&called, rules.table.rate_limit_headers)),
        ))
    }

    fn log_call(
        &self,
        CallVerdict { verdict, statuses }: &CallVerdict<'_>,
        descriptors: &[Descriptor<'_>],
        peer: &ConnectionPeer,
        arrived: Instant,
        trace: Option<TraceId>,
    ) {
        let (status, policy) = match &verdict.outcome {
            RequestOutcome::Forward => (StatusCode::OK, None),
            RequestOutcome::Limited(limited) => {
                (StatusCode::TOO_MANY_REQUESTS, Some(limited.policy))
            }
            RequestOutcome::Denied { policy, .. } | RequestOutcome::InvalidKey { policy, .. } => {
                (StatusCode::TOO_MANY_REQUESTS, Some(*policy))
            }
            RequestOutcome::Unavailable { policy, .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(*policy))
            }
        };
        let over_limit = statuses
            .iter()
            .zip(descriptors)
            .find(|(status, _)| status.is_over_limit);
        let logged_descriptor = over_limit
            .map(|(_, descriptor)| descriptor)
            .or(descriptors.first());
        self.access_log.write(&AccessLogEntry {
            method: "RLS",
            host: logged_descriptor.map_or("", |descriptor| descriptor.domain),
            path: &logged_descriptor
                .map(Descriptor::canonical_text)
                .unwrap_or_default(),
            time_to_head: arrived.elapsed(),
            decision: classify_verdict(verdict).label(),
            policy,
            shadow_rejected: &verdict.shadow_rejected,
            limits: &verdict.limits,
            source: verdict.source,
            time_to_decision: verdict.decided_at.map(|at| at - arrived),
            trace_id: trace,
            ..AccessLogEntry::for_unreadable_request(peer.addr.ip(), status)
        });
    }
}

/// Counts a call when it has ended, also if that is because its caller has left.
struct RateLimitCallGuard<'s> {
    shard: &'s WorkerMetrics,
    call: RlsCallResult,
}

impl Drop for RateLimitCallGuard<'_> {
    fn drop(&mut self) {
        self.shard.record_rls_call(self.call);
    }
}

/// What a call has to have.
fn validate_call(call: &RateLimitRequest) -> Result<(), GrpcError> {
    let invalid = |why| Err(GrpcError(GrpcStatusCode::InvalidArgument, why));
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

fn descriptor_entries(message: &RateLimitDescriptor) -> Vec<(&str, &str)> {
    message
        .entries
        .iter()
        .map(|entry| (&*entry.key, &*entry.value))
        .collect()
}

fn build_descriptor<'a>(
    call: &'a RateLimitRequest,
    message: &RateLimitDescriptor,
    entries: &'a [(&'a str, &'a str)],
) -> Result<Descriptor<'a>, GrpcError> {
    // A call can't say 0, a descriptor can.
    let hits = message
        .hits_addend
        .as_ref()
        .map_or(u64::from(call.hits_addend.max(1)), |hits| hits.value);
    let limit_override = match &message.limit {
        None => None,
        Some(limit) => {
            let per_s = unit_period_s(limit.unit()).ok_or(GrpcError(
                GrpcStatusCode::InvalidArgument,
                "a limit without a unit of time",
            ))?;
            Some((limit.requests_per_unit, per_s * SECOND_US))
        }
    };
    Ok(Descriptor::new(&call.domain, entries, hits, limit_override))
}

fn unit_period_s(unit: Unit) -> Option<u64> {
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

fn build_response(
    CallVerdict { verdict, statuses }: &CallVerdict<'_>,
    fields: RateLimitHeaderSettings,
) -> RateLimitResponse {
    let code = |over| {
        if over {
            response::Code::OverLimit
        } else {
            response::Code::Ok
        }
    };
    let (headers, body) = response_headers_and_body(verdict, fields);
    RateLimitResponse {
        overall_code: code(verdict.outcome.is_over_limit()).into(),
        statuses: statuses
            .iter()
            .map(|status| {
                build_descriptor_status(status, code(status.is_over_limit), verdict.now_us)
            })
            .collect(),
        response_headers_to_add: headers,
        raw_body: body,
    }
}

fn build_descriptor_status(
    status: &DescriptorVerdict<'_>,
    code: response::Code,
    now_us: u64,
) -> response::DescriptorStatus {
    let Some(reported) = &status.tightest_limit else {
        return response::DescriptorStatus {
            code: code.into(),
            ..Default::default()
        };
    };
    let reset_us = rate_limit_headers::reset_at_us(reported, now_us).saturating_sub(now_us);
    response::DescriptorStatus {
        code: code.into(),
        current_limit: Some(build_current_limit(reported)),
        limit_remaining: u32::try_from(reported.standing.remaining).unwrap_or(u32::MAX),
        duration_until_reset: Some(Duration {
            seconds: i64::try_from(reset_us / SECOND_US).unwrap_or(i64::MAX),
            nanos: i32::try_from(reset_us % SECOND_US * 1000).unwrap_or_default(),
        }),
    }
}

fn build_current_limit(reported: &ReportedLimit<'_>) -> response::RateLimit {
    let limit = reported.limit.limit;
    // The largest that fits; older Envoys know no multiplier.
    let units = [Unit::Day, Unit::Hour, Unit::Minute, Unit::Second];
    let fitting = units.into_iter().find_map(|unit| {
        let unit_us = unit_period_s(unit)? * SECOND_US;
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
fn response_headers_and_body(
    verdict: &Verdict<'_>,
    fields: RateLimitHeaderSettings,
) -> (Vec<messages::HeaderValue>, Bytes) {
    let mut headers = HeaderMap::new();
    rate_limit_headers::write_headers(verdict, fields, &mut headers);
    let reject = match &verdict.outcome {
        RequestOutcome::Limited(limited) => {
            if let Some(seconds) = limited.retry.retry_after_s() {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
            }
            limited.reject
        }
        RequestOutcome::Denied { reject, .. } => *reject,
        _ => None,
    };
    if let Some(RejectResponse {
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
