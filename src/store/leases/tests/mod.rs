//! Simulations of fleets in virtual time.

mod fault_simulation;
mod scale_simulation;
