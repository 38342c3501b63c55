//! Counters of `scope = "instance"`: each forwarded request is charged once in its process, and
//! what Redis refused, or a client left, is returned.

use super::{FinishedRun, Violation};
use crate::sim::instance::Outcome;
use crate::sim::scenario::FaultKind;
use crate::sim::world::World;

pub(super) fn check_pods(run: &FinishedRun<'_>, world: &World) -> Vec<Violation> {
    let is_other_process = |instance: usize| {
        run.scenario.faults.iter().any(|fault| match fault.kind {
            FaultKind::Crash { instance: one, .. } | FaultKind::Terminate { instance: one, .. } => {
                one == instance
            }
            _ => false,
        })
    };
    let mut violations = Vec::new();
    for (index, instance) in world.instances.iter().enumerate() {
        let Some((slots, units)) = instance.pod_usage().filter(|_| !is_other_process(index)) else {
            continue;
        };
        let requests = run.scenario.requests.iter().zip(run.records);
        let forwarded = requests.filter(|(request, record)| {
            request.instance == index && record.outcome == Outcome::Forwarded
        });
        let in_flight = forwarded
            .clone()
            .filter(|(_, record)| record.ended_us.is_none());
        let expected = (in_flight.count() as u64, forwarded.count() as u64);
        if (slots, units) != expected {
            violations.push(Violation {
                rule: "an instance's counter differs from what it forwarded",
                at_us: run.scenario.end_us,
                text: format!(
                    "instance {index}: {slots} slots and {units} units are used, expected {expected:?}"
                ),
            });
        }
    }
    violations
}
