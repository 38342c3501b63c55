//! Faults in the fleet and the periods in which they are active.

use std::time::{Duration, Instant};

/// Time after its end in which a fault still explains a problem: fallback admissions are written
/// back, and clients detect a lost node.
const FAULT_AFTERMATH: Duration = Duration::from_secs(5);

/// A fault that the test injects, or (`MachineStalled`) observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FleetFault {
    /// A node is lost permanently.
    NodeLost(u8),
    /// A sidecar cannot reach Redis; its share is one in `live_nodes`.
    NodePartitioned { node: u8, live_nodes: u64 },
    /// A sidecar's process is stopped for some seconds.
    SidecarFrozen { node: u8, live_nodes: u64 },
    /// A sidecar is restarted while a master is unreachable: the new process may not know how many
    /// instances there are.
    RestartedInOutage { master: usize },
    /// A Redis master is unreachable.
    MasterPartitioned(usize),
    /// A Redis master is unreachable and returns empty.
    MasterLost(usize),
    /// The test machine itself stalled, so Redis responses are late on every node.
    MachineStalled,
}

#[derive(Debug)]
pub(crate) struct FaultPeriod {
    pub(crate) fault: FleetFault,
    /// The fault started between these two times.
    pub(crate) began: Instant,
    pub(crate) in_effect: Option<Instant>,
    pub(crate) ended: Option<Instant>,
}

impl FaultPeriod {
    /// Returns whether the fault, or its aftermath, was active at any time between these times.
    pub(crate) fn overlaps(&self, from: Instant, to: Instant) -> bool {
        // All clients detect a lost node soon.
        let over = if let FleetFault::NodeLost(_) = self.fault {
            self.in_effect
        } else {
            self.ended
        };
        self.began <= to && over.is_none_or(|over| over + FAULT_AFTERMATH >= from)
    }
}

impl FleetFault {
    /// Returns the only master that is at fault.
    pub(crate) fn master(self) -> Option<usize> {
        match self {
            Self::MasterPartitioned(master) | Self::MasterLost(master) => Some(master),
            _ => None,
        }
    }

    /// Whether the fault can make the master's counters unreachable, or its replies late.
    pub(crate) fn concerns_master(self, master: usize) -> bool {
        match self {
            Self::MasterPartitioned(other) | Self::MasterLost(other) => other == master,
            Self::NodePartitioned { .. } | Self::SidecarFrozen { .. } | Self::MachineStalled => {
                true
            }
            Self::NodeLost(_) | Self::RestartedInOutage { .. } => false,
        }
    }
}

impl std::fmt::Display for FleetFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NodeLost(_) => "its node is lost",
            Self::NodePartitioned { .. } => "its node is cut off from Redis",
            Self::SidecarFrozen { .. } => "its sidecar is frozen",
            Self::RestartedInOutage { .. } => "sidecars are restarted while a master is cut off",
            Self::MasterPartitioned(_) => "a master is cut off",
            Self::MasterLost(_) => "a master is lost",
            Self::MachineStalled => "this machine stalled",
        })
    }
}
