//! The phases of the test, and what each may do to decisions.

use crate::charge_checks::ChargeTotals;
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScenarioPhase {
    TwoNodes,
    TwoToSix,
    RollingRestart,
    NodeLost,
    NodePartitioned,
    SidecarFrozen,
    MasterPartitioned,
    MasterLost,
    RestartInOutage,
    ReshardInterrupted,
    HostileClient,
    Settlements,
    LowerLimits,
    RaiseLimits,
    SixToThree,
}

/// Whether nodes decide without Redis in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DegradedDecisions {
    /// Redis is unreachable for at least one node, which must notice it.
    Expected,
    Permitted,
    Forbidden,
}

/// The phases in random order, after [`ScenarioPhase::TwoToSix`].
pub(crate) const SHUFFLED_PHASES: [ScenarioPhase; 12] = [
    ScenarioPhase::RollingRestart,
    ScenarioPhase::NodeLost,
    ScenarioPhase::NodePartitioned,
    ScenarioPhase::SidecarFrozen,
    ScenarioPhase::MasterPartitioned,
    ScenarioPhase::MasterLost,
    ScenarioPhase::RestartInOutage,
    ScenarioPhase::ReshardInterrupted,
    ScenarioPhase::HostileClient,
    ScenarioPhase::Settlements,
    ScenarioPhase::LowerLimits,
    ScenarioPhase::RaiseLimits,
];

impl ScenarioPhase {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::TwoNodes => "two nodes",
            Self::TwoToSix => "two become six",
            Self::RollingRestart => "every sidecar is restarted",
            Self::NodeLost => "a node is lost, and replaced",
            Self::NodePartitioned => "a node is cut off from Redis",
            Self::SidecarFrozen => "a sidecar is frozen",
            Self::MasterPartitioned => "a master is cut off",
            Self::MasterLost => "a master is killed, and comes back empty",
            Self::RestartInOutage => "a master is cut off, and sidecars are restarted",
            Self::ReshardInterrupted => "slots stay open, and a reshard is killed",
            Self::HostileClient => "a client over its limit opens 200 connections",
            Self::Settlements => "1,000 settlements per second",
            Self::LowerLimits => "a ConfigMap with lower limits",
            Self::RaiseLimits => "a ConfigMap with the first limits",
            Self::SixToThree => "six become three",
        }
    }

    pub(crate) fn degraded_decisions(self) -> DegradedDecisions {
        match self {
            Self::NodePartitioned
            | Self::MasterPartitioned
            | Self::MasterLost
            | Self::RestartInOutage => DegradedDecisions::Expected,
            Self::SidecarFrozen => DegradedDecisions::Permitted,
            _ => DegradedDecisions::Forbidden,
        }
    }
}

/// A completed phase.
#[derive(Debug)]
pub(crate) struct PhaseResult {
    pub(crate) phase: ScenarioPhase,
    pub(crate) began: Instant,
    /// Time from which the fleet is healthy again.
    pub(crate) ended: Instant,
    pub(crate) nodes: usize,
    /// Decisions made without Redis.
    pub(crate) degraded_decisions: u64,
    /// Time until all nodes used Redis again.
    pub(crate) recovery: Option<Duration>,
    pub(crate) charges: ChargeTotals,
}
