//! A deterministic simulation of instances, network and Redis; see docs/CONTRIBUTING.md.

mod faults;
mod instance;
mod network;
mod redis_server;
mod resp;
mod scenario;
mod trace;
mod world;

use scenario::*;

fn small(seed: u64) -> Scenario {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut requests = Vec::new();
    for n in 0..200 {
        requests.push(RequestSpec {
            at_us: 200_000 + n * 20_000 + rng.u64(0..10_000),
            instance: (n % 2) as usize,
            worker: 0,
            route: 0,
            client: rng.u32(0..3),
            cost: 1,
            service_us: 3000,
            actual: None,
            leaves_after_us: None,
            pause_us: 0,
        });
    }
    requests.sort_by_key(|r| r.at_us);
    Scenario {
        seed,
        class: ScenarioClass::Healthy,
        topology: Topology::Standalone,
        instances: 2,
        workers: 1,
        policies: vec![PolicySpec {
            route: 0,
            rule: Rule::SlidingLog,
            requests: 10,
            per_us: SECOND,
            on_failure: OnFailure::Open,
            is_global: false,
            estimate: None,
            lease: None,
            block_for_us: None,
            shards: 1,
            second_limit: None,
        }],
        requests,
        faults: vec![],
        rates_ppm: vec![],
        delay_us: 1000,
        timeout_us: 50_000,
        end_us: 8 * SECOND,
    }
}

#[test]
fn smoke() {
    let run = || {
        let mut world = world::World::new(small(1));
        world.trace.is_verbose = true;
        world.run();
        println!(
            "{} commands, hash {:x}",
            world.trace.commands,
            world.trace.hash()
        );
        let log = world.log.lock().unwrap();
        println!(
            "{:?}",
            log.iter()
                .filter(|r| r.outcome == instance::Outcome::Forwarded)
                .count()
        );
        println!("{:?}", &log[100]);
        drop(log);
        (world.trace.hash(), world.trace.lines)
    };
    let (a, b) = (run(), run());
    for (x, y) in a.1.iter().zip(&b.1) {
        if x != y {
            println!("{x:?}\n{y:?}");
            break;
        }
    }
    assert_eq!(a.0, b.0);
}
