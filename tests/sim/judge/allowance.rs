//! What each fault excuses. Everything else is a violation: wrong refusals, charges for requests
//! that were not forwarded, healthy masters that do not decide, a missing recovery.
//! `docs/GUARANTEE.md` states the same to users.
//!
//! | fault | outage | windows may contain one more limit | lost charges | unknown charges |
//! |---|---|---|---|---|
//! | restart, failover | while down | if writes were lost; `local`: across its start | if writes were lost | yes |
//! | hang, error replies, partition, slow | while it lasts | `local`: across its start; from start to end if one instance is isolated | no | yes |
//! | reset, half-open connections | until replaced | `local`: across its start | no | yes |
//! | lost scripts, moving slots, a new password | no | no | no | no |
//! | eviction | no | at that moment | yes | no |
//! | clock forward | no | at that moment | yes | no |
//! | clock backward | refuses until a period after the first refusal | no | no | no |
//! | wall clock of an instance, its windows in memory | back: refuses until a window after the step | forward: at that moment | no | no |
//! | crash | of the instance | in an outage, until it is over | in an outage | yes |
//! | SIGTERM, with `store.state_dir` | of the instance | if the new process starts in another outage than the old one ended in, until it is over | no | yes |
//! | frozen instance | of the instance | in an outage | in an outage | yes |
//!
//! Outages with a pause of less than [`STATUS_EXCHANGE_US`] are one. Units that Redis admits in the pause may come on top.
//!
//! Slots may lapse in an outage that leaves less than a second until two thirds of their TTL.
//!
//! A verdict of a frozen instance may come as late as it continues, for a charge from before.
//!
//! `open` limits nothing in an outage. Unknown charges: a request without a verdict, or with one
//! that was made in an outage, may stay charged. An estimate may stay charged if its settlement was
//! due in an outage. A script that is not loaded yet costs up to six round trips; if that exceeds
//! the timeout, a request may be decided without Redis.
//!
//! Windows with one more limit per fault overlap one of these intervals: 3 s from the start of an
//! outage or step; data loss until 3 s after the server's return; isolation, or a process fault in
//! an outage (not SIGTERM with `state_dir`), until 8 s after its end. An instance without a reply
//! in a pause does not know of the units that Redis admits in it. Decisions may be degraded for 8 s
//! after a fault. `concurrency` admits 3 × `requests` from the fault until `lease_ttl` + 5 s.

use crate::sim::scenario::{FaultKind, Scenario};
use tidegate::store::STATUS_EXCHANGE_US;

/// How long after a fault decisions may still be degraded: the breaker's probes, the connection's
/// backoff, and the time in which all instances recover.
pub(crate) const RECOVERY_US: u64 = 8_000_000;

/// Instances notice an outage within this time.
const DETECTION_US: u64 = 3_000_000;

/// What one fault excuses.
#[derive(Clone, Debug)]
pub(crate) struct Excuse {
    pub(crate) from_us: u64,
    /// The end of the fault itself.
    pub(crate) to_us: u64,
    /// `None`: all servers.
    pub(crate) server: Option<usize>,
    /// `None`: all instances.
    pub(crate) instance: Option<usize>,
    pub(crate) is_outage: bool,
    pub(crate) loses_charges: bool,
    /// A window that overlaps this interval may contain one more limit.
    pub(crate) extra_limit: Option<(u64, u64)>,
    /// The pause of the outage that ends with this fault.
    pub(crate) pause: Option<(u64, u64)>,
}

/// The excuses of all faults of a scenario.
pub(crate) fn list_excuses(scenario: &Scenario) -> Vec<Excuse> {
    let mut excuses: Vec<Excuse> = scenario
        .faults
        .iter()
        // The judge of each counter knows whether it follows a wall clock.
        .filter(|fault| !matches!(fault.kind, FaultKind::WallClockStep { .. }))
        .map(|fault| excuse(scenario, fault.at_us, &fault.kind))
        .collect();
    excuses.sort_by_key(|excuse| excuse.from_us);
    let outages: Vec<(u64, u64)> = excuses
        .iter()
        .filter(|one| one.is_outage && one.server.is_some())
        .map(|one| (one.from_us, one.to_us + RECOVERY_US))
        .collect();
    for excuse in &mut excuses {
        let is_process = excuse.server.is_none() && excuse.is_outage;
        let overlap = outages
            .iter()
            .any(|(from_us, to_us)| *from_us < excuse.to_us && excuse.from_us < *to_us);
        // The new process continues with the stored usage if the old one had noticed the outage.
        let is_continued = |from_us: u64| {
            let stores_usage = scenario.stores_usage() && !excuse.loses_charges;
            stores_usage && from_us + DETECTION_US <= excuse.from_us
        };
        let starts_in_outage = outages.iter().any(|(from_us, to_us)| {
            (*from_us..*to_us - RECOVERY_US).contains(&excuse.to_us) && !is_continued(*from_us)
        });
        if is_process && (overlap && excuse.loses_charges || starts_in_outage) {
            excuse.extra_limit = Some((excuse.from_us, excuse.to_us + RECOVERY_US));
        } else if is_process {
            excuse.loses_charges = false;
        }
    }
    add_outage_starts(&mut excuses);
    excuses
}

/// Gives each outage one more limit across its start.
fn add_outage_starts(excuses: &mut [Excuse]) {
    let mut ends_us = None;
    for excuse in excuses
        .iter_mut()
        .filter(|one| one.is_outage && one.server.is_some())
    {
        if ends_us.is_none_or(|ends_us| excuse.from_us > ends_us + STATUS_EXCHANGE_US)
            && excuse.extra_limit.is_none()
        {
            excuse.extra_limit = Some((excuse.from_us, excuse.from_us + DETECTION_US));
        }
        excuse.pause = ends_us
            .filter(|ends_us| *ends_us <= excuse.from_us)
            .map(|ends_us| (ends_us, excuse.from_us));
        ends_us = ends_us.max(Some(excuse.to_us));
    }
}

fn excuse(scenario: &Scenario, at_us: u64, kind: &FaultKind) -> Excuse {
    let none = Excuse {
        from_us: at_us,
        to_us: at_us,
        server: None,
        instance: None,
        is_outage: false,
        loses_charges: false,
        extra_limit: None,
        pause: None,
    };
    let on_server = |server: usize| Excuse {
        server: Some(server),
        ..none.clone()
    };
    let outage = |server: usize, for_us: u64| Excuse {
        to_us: at_us + for_us,
        is_outage: true,
        ..on_server(server)
    };
    let with_loss = |excuse: Excuse, is_lost: bool| Excuse {
        loses_charges: is_lost,
        extra_limit: is_lost.then_some((at_us, excuse.to_us + DETECTION_US)),
        ..excuse
    };
    match *kind {
        FaultKind::Restart {
            server,
            down_us,
            lost_us,
        } => with_loss(outage(server, down_us), lost_us > 0),
        FaultKind::Failover {
            server, after_us, ..
        } => with_loss(outage(server, after_us), true),
        FaultKind::Hang { server, for_us } | FaultKind::ErrorReplies { server, for_us, .. } => {
            outage(server, for_us)
        }
        FaultKind::Partition {
            instance: None,
            server,
            for_us,
        } => outage(server, for_us),
        FaultKind::Partition {
            instance,
            server,
            for_us,
        } => Excuse {
            instance,
            extra_limit: Some((at_us, at_us + for_us + RECOVERY_US)),
            ..outage(server, for_us)
        },
        FaultKind::Slow {
            server,
            extra_us,
            for_us,
        } => {
            let round_trip_us = 2 * (extra_us + 2 * scenario.delay_us) + 10_000;
            Excuse {
                is_outage: round_trip_us >= scenario.timeout_us,
                ..outage(server, for_us)
            }
        }
        FaultKind::Reset { server } => outage(server, 0),
        FaultKind::HalfOpen { instance, server } => Excuse {
            instance: Some(instance),
            extra_limit: Some((at_us, at_us + RECOVERY_US)),
            ..outage(server, 0)
        },
        FaultKind::ScriptFlush { .. }
        | FaultKind::Migrate { .. }
        | FaultKind::WallClockStep { .. }
        | FaultKind::RotateLogin { .. } => none,
        FaultKind::Evict { server, .. } => with_loss(on_server(server), true),
        FaultKind::ClockStep { server, by_us } => with_loss(on_server(server), by_us > 0),
        FaultKind::Crash { .. } | FaultKind::Terminate { .. } | FaultKind::Freeze { .. } => {
            excuse_process(none, kind)
        }
    }
}

/// The excuse of a fault of an instance. `none` excuses nothing at its time.
fn excuse_process(none: Excuse, kind: &FaultKind) -> Excuse {
    let at_us = none.from_us;
    let process = |instance: usize, for_us: u64, loses_charges: bool| Excuse {
        to_us: at_us + for_us,
        instance: Some(instance),
        is_outage: true,
        loses_charges,
        ..none.clone()
    };
    match *kind {
        FaultKind::Crash {
            instance,
            restart_us,
        } => process(instance, restart_us, true),
        FaultKind::Terminate {
            instance,
            restart_us,
        } => process(
            instance,
            restart_us + crate::sim::world::TERMINATION_US,
            false,
        ),
        FaultKind::Freeze {
            instance, for_us, ..
        } => process(instance, for_us, true),
        _ => none,
    }
}

/// Whether an instance could reach a server without any fault between two times.
pub(crate) fn is_healthy(
    excuses: &[Excuse],
    (instance, server): (usize, Option<usize>),
    (from_us, to_us): (u64, u64),
) -> bool {
    excuses.iter().all(|excuse| {
        let is_affected = excuse.instance.is_none_or(|one| one == instance)
            && (excuse.server.is_none() || server.is_none() || excuse.server == server);
        !excuse.is_outage
            || !is_affected
            || to_us < excuse.from_us
            || from_us > excuse.to_us + RECOVERY_US
    })
}
