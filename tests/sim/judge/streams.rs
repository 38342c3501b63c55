//! `cut_off`: streams use no more than their key is charged, but for an event, and none is cut off
//! while units are free.

use super::allowance::is_healthy;
use super::limits::{extra_limits, skew_us};
use super::service::may_refuse_units;
use super::{CounterHistory, CounterUse, FinishedRun, Violation};
use crate::sim::instance::RequestRecord;
use crate::sim::scenario::{OnFailure, PolicySpec, RequestSpec, Rule, StreamReport};
use crate::sim::stream::StreamEnd;

/// The units that a complete stream has reported, by which it is settled.
pub(super) fn settled_units(
    policy: &PolicySpec,
    request: &RequestSpec,
    record: &RequestRecord,
) -> Option<u64> {
    let stream = record
        .stream
        .as_ref()
        .filter(|_| policy.cut_off.is_some())?;
    let is_reported = request.stream?.report != StreamReport::Never;
    (is_reported && stream.end == StreamEnd::Complete).then(|| stream.units())
}

/// The most units that a policy has charged for a stream at a time.
pub(super) fn most_units(
    policy: &PolicySpec,
    request: &RequestSpec,
    record: &RequestRecord,
) -> Option<u64> {
    let stream = record.stream.as_ref()?;
    let event_units = request.stream?.event_units;
    // A slice is taken in advance, and another one may be on its way.
    let advance = event_units + 2 * policy.cut_off?;
    Some(policy.cost(request).max(stream.most_units() + advance))
}

/// The least and the most units that a policy has charged for a stream at the end of the run.
pub(super) fn charged_units(
    run: &FinishedRun<'_>,
    policy: &PolicySpec,
    request: usize,
    is_settled: bool,
) -> Option<(u64, u64)> {
    let (request, record) = (&run.scenario.requests[request], &run.records[request]);
    let stream = record.stream.as_ref()?;
    let (estimate, event_units) = (policy.cost(request), request.stream?.event_units);
    let most = most_units(policy, request, record)?;
    if !is_settled {
        // A slice without an answer may be charged, and a write-back may be repeated.
        let least = settled_units(policy, request, record).unwrap_or(estimate);
        return Some((least.min(estimate), 3 * most));
    }
    if let Some(units) = settled_units(policy, request, record) {
        return Some((units, units));
    }
    let is_cut_off = matches!(stream.end, StreamEnd::CutOff { .. });
    let cuts_off = run
        .policies_of(request)
        .filter(|(_, one)| one.cut_off.is_some());
    if is_cut_off && cuts_off.count() == 1 {
        return Some((stream.units(), stream.units()));
    }
    // The last event may have used more than is charged.
    let least = (stream.units() + 1)
        .saturating_sub(event_units)
        .max(estimate);
    Some((least, most))
}

/// One moment of a stream.
struct StreamMoment {
    at_us: u64,
    /// The index of the stream.
    stream: usize,
    /// Units used so far.
    units: u64,
}

/// All units that streams use are charged since the first of them was decided, but for less than
/// an event of each.
pub(super) fn check_streams(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
) -> Option<Violation> {
    let policy = history.policy;
    policy.cut_off?;
    let is_stream =
        |one: &&CounterUse| one.is_forwarded && run.records[one.request].stream.is_some();
    let mut streams: Vec<&CounterUse> = history.uses.iter().filter(is_stream).collect();
    streams.sort_by_key(|one| one.decided_us);
    let moments = list_moments(run, history, &streams);
    let requests = history
        .uses
        .iter()
        .map(|one| &run.scenario.requests[one.request]);
    let limit = requests.map(|one| policy.amount(one)).max()?;
    let second = policy
        .second_limit
        .map(|second| (second, 10 * policy.per_us));
    let mut limits = std::iter::once((limit, policy.per_us)).chain(second);
    limits.find_map(|limit| check_limit(run, history, (&streams, &moments), limit))
}

/// The moments of all streams, in order. With `open`, only those before an outage.
fn list_moments(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    streams: &[&CounterUse],
) -> Vec<StreamMoment> {
    let policy = history.policy;
    let is_unlimited = policy.on_failure == OnFailure::Open && !policy.is_of_instance;
    let mut moments = Vec::new();
    for (number, one) in streams.iter().enumerate() {
        let endpoints = (run.scenario.requests[one.request].instance, history.server);
        let is_limited = |at_us: u64| {
            let until_us = at_us + run.scenario.timeout_us;
            !is_unlimited || is_healthy(&run.excuses, endpoints, (one.arrived_us, until_us))
        };
        let used = run.records[one.request].stream.iter();
        let used = used.flat_map(|stream| &stream.used);
        let limited = used.take_while(|(at_us, _)| is_limited(*at_us));
        moments.extend(limited.map(|(at_us, units)| StreamMoment {
            at_us: *at_us,
            stream: number,
            units: *units,
        }));
    }
    moments.sort_by_key(|one| one.at_us);
    moments
}

fn check_limit(
    run: &FinishedRun<'_>,
    history: &CounterHistory<'_>,
    (streams, moments): (&[&CounterUse], &[StreamMoment]),
    (limit, per_us): (u64, u64),
) -> Option<Violation> {
    let policy = history.policy;
    let skew_us = skew_us(run, per_us);
    let (largest, rate, length_us) = match policy.rule {
        Rule::TokenBucket { burst } => (burst, limit as f64 / per_us as f64, u64::MAX),
        Rule::FixedWindow | Rule::CalendarDay => (2 * limit, 0.0, per_us.saturating_sub(skew_us)),
        _ => (limit, 0.0, per_us.saturating_sub(skew_us)),
    };
    for (first, from) in streams.iter().enumerate() {
        let from_us = from.decided_us;
        let begin = moments.partition_point(|one| one.at_us < from_us);
        let in_time = moments[begin..]
            .iter()
            .take_while(|one| one.at_us < from_us.saturating_add(length_us));
        let mut used = vec![0; streams.len()];
        let (mut units, mut overspent) = (0, 0);
        for moment in in_time.filter(|one| one.stream >= first) {
            let request = &run.scenario.requests[streams[moment.stream].request];
            let event_units = request.stream.map_or(1, |stream| stream.event_units) - 1;
            // The sum of the streams, each of which overspends by less than an event.
            let last = std::mem::replace(&mut used[moment.stream], moment.units);
            let overspends = |units: u64| match units > policy.cost(request) {
                true => event_units,
                false => 0,
            };
            units = units + moment.units - last;
            overspent = overspent + overspends(moment.units) - overspends(last);
            let returned = rate * (moment.at_us - from_us + skew_us) as f64;
            let allowed = largest + overspent + returned.ceil() as u64;
            if units <= allowed {
                continue;
            }
            let interval = (from_us, moment.at_us);
            let extra = extra_limits(run, history, interval.0, interval.1);
            let allowed = allowed + largest * extra + units_in_pauses(run, streams, interval);
            if units > allowed {
                return Some(Violation {
                    rule: "streams use more than the limit",
                    at_us: moment.at_us,
                    text: format!(
                        "{}: {units} units from {from_us} us on, allowed {allowed}",
                        history.name()
                    ),
                });
            }
        }
    }
    None
}

/// Units of streams in a pause of an outage: instances without a reply about the key do not know
/// them.
fn units_in_pauses(
    run: &FinishedRun<'_>,
    streams: &[&CounterUse],
    (from_us, to_us): (u64, u64),
) -> u64 {
    let pauses = run.excuses.iter().filter_map(|excuse| excuse.pause);
    let pauses: Vec<_> = pauses
        .filter(|(start_us, end_us)| *start_us <= to_us && from_us <= *end_us)
        .collect();
    let is_in_pause = |one: &&&CounterUse| {
        pauses.iter().any(|(start_us, end_us)| {
            one.decided_us <= *end_us + run.scenario.timeout_us && *start_us <= one.charged_until_us
        })
    };
    let in_pause = streams.iter().filter(is_in_pause);
    in_pause.map(|one| one.most_units).sum()
}

/// A stream ends after a whole event, and only if one of its keys may lack a slice.
pub(super) fn check_cut_offs(
    run: &FinishedRun<'_>,
    histories: &[CounterHistory<'_>],
) -> Option<Violation> {
    run.records.iter().enumerate().find_map(|(index, record)| {
        let stream = record.stream.as_ref()?;
        let StreamEnd::CutOff {
            at_us,
            is_within_event,
        } = stream.end
        else {
            return None;
        };
        let violation = |rule: &'static str, text: String| {
            let text = format!("request {index}: {text}");
            Some(Violation { rule, at_us, text })
        };
        if is_within_event {
            return violation("cut off within an event", format!("{:?}", stream.end));
        }
        let request = &run.scenario.requests[index];
        let histories = histories.iter().filter(|one| one.policy.cut_off.is_some());
        let uses = histories.filter_map(|history| {
            let mut uses = history.uses.iter();
            Some((history, uses.find(|one| one.request == index)?))
        });
        let uses: Vec<_> = uses.collect();
        let is_excused = uses.iter().any(|(history, one)| {
            let endpoints = (request.instance, history.server);
            !is_healthy(&run.excuses, endpoints, (one.arrived_us, at_us))
        });
        let is_full = uses.iter().any(|(history, one)| {
            let at_cut = CounterUse {
                arrived_us: at_us,
                decided_us: at_us,
                ..(*one).clone()
            };
            let slice = history.policy.cut_off.unwrap_or_default();
            may_refuse_units(run, history, &at_cut, stream.most_units() + slice)
        });
        if is_excused || is_full {
            return None;
        }
        let names: Vec<String> = uses.iter().map(|(history, _)| history.name()).collect();
        violation("cut off although units are free", names.join(", "))
    })
}
