use super::*;
use proptest::prelude::*;
use std::collections::HashMap as Exact;

fn policy(name: &str) -> Arc<str> {
    name.into()
}

fn workers(count: usize) -> (Vec<Arc<Limited>>, Top) {
    let workers: Vec<Arc<Limited>> = (0..count).map(|_| Arc::default()).collect();
    (workers.clone(), Top::of(workers.into()))
}

fn keys(top: &Top, policy: Option<&str>) -> Ranking {
    top.ranking(Ranked::Keys, policy, usize::MAX)
}

/// What must hold of a ranking, whatever came: exact is how often each key really did.
fn check(ranking: &Ranking, exact: &Exact<u64, u64>) {
    let told: Exact<u64, &Entry> = ranking
        .entries
        .iter()
        .map(|entry| (entry.text.parse().unwrap(), entry))
        .collect();
    assert_eq!(told.len(), ranking.entries.len(), "each once");
    assert_eq!(ranking.total, exact.values().sum::<u64>());
    for (key, count) in exact {
        match told.get(key) {
            Some(entry) => {
                let possible = entry.count - entry.error..=entry.count;
                assert!(possible.contains(count), "{count} is not in {possible:?}");
            }
            None => assert!(
                *count <= ranking.unseen,
                "{count} times and unseen ({})",
                ranking.unseen
            ),
        }
    }
    assert!(
        ranking
            .entries
            .iter()
            .all(|entry| exact.contains_key(&entry.text.parse().unwrap()))
    );
    assert!(ranking.entries.is_sorted_by(|a, b| a.count >= b.count));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Few heavy keys in a stream of many light ones, over several workers and generations.
    #[test]
    fn counts_are_right_or_too_high_by_at_most_their_error(
        stream in prop::collection::vec((0_usize..3, prop_oneof![0_u64..8, 0_u64..3000]), 0..6000),
        turn_at in 0_usize..6000,
    ) {
        let (workers, top) = workers(3);
        let (api, mut exact) = (policy("api"), Exact::new());
        top.tick(1);
        for (at, (worker, key)) in stream.into_iter().enumerate() {
            if at == turn_at {
                top.tick(1 + GENERATION_S);
            }
            workers[worker].key(&api, key.into(), || key.to_string());
            *exact.entry(key).or_default() += 1;
        }
        let ranking = keys(&top, None);
        check(&ranking, &exact);
        // The promise of the paper, added over the sketches.
        prop_assert!(ranking.unseen <= ranking.total / CAPACITY as u64);
    }
}

#[test]
fn a_flood_of_random_keys_takes_no_room_and_hides_nobody_who_is_worse() {
    let (workers, top) = workers(1);
    let api = policy("api");
    let mut random = fastrand::Rng::with_seed(7);
    for step in 0..200_000_u32 {
        workers[0].key(&api, u128::from(random.u64(..)) << 8, || "x".repeat(10_000));
        workers[0].path(&api, &format!("/{}", random.u64(..)));
        if step % 100 == 0 {
            workers[0].key(&api, 1, || "bad".to_owned());
        }
    }
    let ranking = keys(&top, None);
    assert_eq!(ranking.entries.len(), CAPACITY);
    let bad = ranking
        .entries
        .iter()
        .find(|entry| &*entry.text == "bad")
        .unwrap();
    assert!(
        bad.count >= 2000 && bad.count - bad.error <= 2000,
        "{bad:?}"
    );
    assert!(
        ranking
            .entries
            .iter()
            .all(|entry| entry.text.len() <= MAX_TEXT_BYTES)
    );
    assert!(
        ranking
            .entries
            .iter()
            .any(|entry| entry.text.ends_with(CUT))
    );
    let sketch = &workers[0].paths.lock().young;
    assert_eq!(
        (sketch.places.len(), sketch.items.len(), sketch.counts.len()),
        (CAPACITY, CAPACITY, CAPACITY)
    );
}

#[test]
fn one_policy_can_be_asked_for() {
    let (workers, top) = workers(2);
    let (a, b) = (policy("a"), policy("b"));
    for worker in &workers {
        worker.key(&a, 1, || "a/1".to_owned());
        worker.key(&b, 2, || "b/1".to_owned());
        worker.path(&a, "/same");
        worker.path(&b, "/same");
    }
    workers[0].path(&b, "/same");
    let of_b = keys(&top, Some("b"));
    let texts: Vec<&str> = of_b.entries.iter().map(|entry| &*entry.text).collect();
    assert_eq!(
        (texts, of_b.entries[0].count, of_b.total),
        (vec!["b/1"], 2, 4)
    );
    let paths = top.ranking(Ranked::Paths, None, 1);
    assert_eq!(
        (
            paths.entries.len(),
            &*paths.entries[0].policy,
            paths.entries[0].count
        ),
        (1, "b", 3)
    );
}

#[test]
fn what_is_older_than_an_hour_is_forgotten_and_what_is_younger_than_half_of_one_is_not() {
    let (workers, top) = workers(1);
    let api = policy("api");
    let add = |id: u128| workers[0].key(&api, id, || id.to_string());
    let told = || {
        let ranking = keys(&top, None);
        let mut texts: Vec<String> = ranking
            .entries
            .iter()
            .map(|entry| entry.text.to_string())
            .collect();
        texts.sort();
        (texts.join(" "), ranking.since_s)
    };
    let start = 1_700_000_000;
    top.tick(start);
    add(1);
    top.tick(start + GENERATION_S - 1);
    assert_eq!(told(), ("1".to_owned(), start));
    top.tick(start + GENERATION_S);
    add(2);
    assert_eq!(told(), ("1 2".to_owned(), start));
    top.tick(start + 2 * GENERATION_S);
    assert_eq!(told(), ("2".to_owned(), start + GENERATION_S));
    // A clock that goes back forgets nothing.
    top.tick(start);
    assert_eq!(told().0, "2");
    // A long sleep leaves one generation, which is said to have begun long ago.
    top.tick(start + 9 * GENERATION_S);
    assert_eq!(told(), (String::new(), start + 2 * GENERATION_S));
}

#[test]
fn no_path_harms_a_terminal_or_a_page() {
    let (workers, top) = workers(1);
    let api = policy("api");
    let hostile = [
        "/\u{1b}[31m",
        "/<script>\"`",
        "/\u{202e}\u{9b}\u{7f}\u{0}\r\n",
        &"/ü".repeat(300),
    ];
    for path in hostile {
        workers[0].path(&api, path);
    }
    for entry in top.ranking(Ranked::Paths, None, 9).entries {
        assert!(
            entry.text.bytes().all(|byte| byte.is_ascii_graphic()),
            "{entry:?}"
        );
        assert!(
            !entry.text.contains(['<', '>', '"', '`', '\\']),
            "{entry:?}"
        );
        assert!(entry.text.len() <= MAX_TEXT_BYTES, "{entry:?}");
    }
}
