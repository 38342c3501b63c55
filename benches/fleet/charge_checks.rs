//! Checks that Redis charged each forwarded request once, and nothing else.
//!
//! Some keys have a counter that is never full. After each phase, while the clients wait, its
//! growth must equal what the apps received. A reply that a fault may have lost can leave a charge;
//! nothing permits a forwarded request without one, except a master that lost its data.

use crate::FleetContext;
use crate::faults::FleetFault;
use crate::masters::RedisMasters;
use crate::policies::{FleetKey, HourlyCounter};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tidegate::store::redis::CounterInspector;
use tokio::time::sleep;

/// Timeout for settlements, returns and write-backs.
const CHARGE_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_COUNTERS: usize = 10_000;

/// Units that apps received, and units that Redis charged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ChargeTotals {
    pub(crate) forwarded: u64,
    pub(crate) charged: u64,
    /// Units of the largest surplus and deficit of one key. Only faults permit them.
    pub(crate) max_surplus: u64,
    pub(crate) max_deficit: u64,
}

/// Units of one key at the end of the last phase.
#[derive(Clone, Copy, Debug, Default)]
struct KeyBalance {
    forwarded: u64,
    charged: u64,
}

/// Charges of one key in one phase.
struct KeyCharges {
    forwarded: u64,
    charged: u64,
    /// Charges without a forwarded request that faults permit.
    permitted_surplus: u64,
    is_data_lost: bool,
}

#[derive(Debug, Default)]
pub(crate) struct ChargeChecker(BTreeMap<usize, KeyBalance>);

impl ChargeChecker {
    /// Checks the charges since the last call. `degraded` decisions were made without Redis.
    pub(crate) async fn check_charges(
        &mut self,
        context: &FleetContext,
        masters: &RedisMasters,
        began: Instant,
        degraded: u64,
    ) -> ChargeTotals {
        let deadline = Instant::now() + CHARGE_TIMEOUT;
        loop {
            let charged = read_charged_units(masters).await;
            let is_late = Instant::now() > deadline;
            let (mut totals, mut balances, mut is_right) =
                (ChargeTotals::default(), BTreeMap::new(), true);
            for (number, key) in context.keys.iter().enumerate() {
                let Some(counter) = &key.hourly_counter else {
                    continue;
                };
                let last = self.0.get(&number).copied().unwrap_or_default();
                let now = KeyBalance {
                    forwarded: context.forwarded_units(number, key),
                    charged: charged.get(&counter.redis_key).copied().unwrap_or(0),
                };
                let mut charges = context.permitted_charges(number, counter, began, degraded);
                charges.forwarded = now.forwarded - last.forwarded;
                // A master that lost its data counts from 0.
                charges.charged = now.charged.saturating_sub(last.charged);
                balances.insert(number, now);
                totals.add(&charges);
                if !charges.are_right() {
                    is_right = false;
                    if is_late {
                        context.record_wrong_charges(key, &charges);
                    }
                }
            }
            if is_right || is_late {
                self.0 = balances;
                return totals;
            }
            sleep(Duration::from_millis(300)).await;
        }
    }
}

impl ChargeTotals {
    fn add(&mut self, charges: &KeyCharges) {
        let KeyCharges {
            forwarded, charged, ..
        } = *charges;
        self.forwarded += forwarded;
        self.charged += charged;
        self.max_surplus = self.max_surplus.max(charged.saturating_sub(forwarded));
        self.max_deficit = self.max_deficit.max(forwarded.saturating_sub(charged));
    }
}

impl KeyCharges {
    fn are_right(&self) -> bool {
        (self.charged >= self.forwarded || self.is_data_lost)
            && self.charged <= self.forwarded + self.permitted_surplus
    }
}

impl FleetContext {
    /// Returns the units that apps received.
    fn forwarded_units(&self, number: usize, key: &FleetKey) -> u64 {
        let requests = self.forwarded.of_key(number);
        let has_costs = key.policy.is_some_and(|policy| policy.has_costs());
        let units = requests
            .iter()
            .map(|request| if has_costs { request.cost } else { 1 });
        units.sum()
    }

    fn permitted_charges(
        &self,
        number: usize,
        counter: &HourlyCounter,
        began: Instant,
        degraded: u64,
    ) -> KeyCharges {
        let failed = self.ledger.failed_count(number, began);
        let mut permitted = KeyCharges {
            forwarded: 0,
            charged: 0,
            permitted_surplus: 0,
            is_data_lost: false,
        };
        let periods = self.ledger.fault_periods.lock().unwrap();
        for period in periods
            .iter()
            .filter(|it| it.overlaps(began, Instant::now()))
        {
            permitted.permitted_surplus += match period.fault {
                FleetFault::NodeLost(_) => failed,
                fault if fault.concerns_master(counter.master) => failed + degraded,
                _ => 0,
            };
            permitted.is_data_lost |= period.fault == FleetFault::MasterLost(counter.master);
        }
        permitted
    }

    fn record_wrong_charges(&self, key: &FleetKey, charges: &KeyCharges) {
        let (path, master) = (key.path(), key.master);
        let KeyCharges {
            forwarded,
            charged,
            permitted_surplus,
            ..
        } = charges;
        self.ledger.record_unexplained_problem(format!(
            "{path}, key on master {master}: {forwarded} units forwarded, {charged} charged; faults permit {permitted_surplus} more"
        ));
    }
}

/// Returns the used units of each counter, by its key in Redis.
async fn read_charged_units(masters: &RedisMasters) -> BTreeMap<String, u64> {
    let read = async || {
        let inspector = CounterInspector::connect(masters.client_settings()).await?;
        inspector.list_counters(None, MAX_COUNTERS).await
    };
    let deadline = Instant::now() + CHARGE_TIMEOUT;
    loop {
        match read().await {
            Ok((counters, _)) => {
                let units = counters.into_iter().map(|it| (it.key, it.used_units));
                return units.collect();
            }
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        sleep(Duration::from_millis(200)).await;
    }
}
