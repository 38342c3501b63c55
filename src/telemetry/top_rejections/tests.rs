use super::*;
use proptest::prelude::*;
use std::collections::HashMap as Exact;

fn policy_name(name: &str) -> Arc<str> {
    name.into()
}

fn new_rejection_counters(count: usize) -> (Vec<Arc<WorkerRejections>>, TopRejections) {
    let workers: Vec<Arc<WorkerRejections>> = (0..count).map(|_| Arc::default()).collect();
    (workers.clone(), TopRejections::from_workers(workers.into()))
}

fn rank_keys(top: &TopRejections, policy: Option<&str>) -> RejectionRanking {
    top.ranking(RejectionDimension::Keys, policy, usize::MAX)
}

/// Checks the guarantees of a ranking against the exact count of each key.
fn assert_ranking_bounds(ranking: &RejectionRanking, exact: &Exact<u64, u64>) {
    let ranked: Exact<u64, &RejectionEntry> = ranking
        .entries
        .iter()
        .map(|entry| (entry.text.as_str().parse().unwrap(), entry))
        .collect();
    assert_eq!(ranked.len(), ranking.entries.len(), "each once");
    assert_eq!(ranking.refused, exact.values().sum::<u64>());
    for (key, count) in exact {
        match ranked.get(key) {
            Some(entry) => {
                let possible = entry.count - entry.error..=entry.count;
                assert!(possible.contains(count), "{count} is not in {possible:?}");
            }
            None => assert!(
                *count <= ranking.unseen_at_most,
                "{count} times and unseen ({})",
                ranking.unseen_at_most
            ),
        }
    }
    assert!(
        ranking
            .entries
            .iter()
            .all(|entry| exact.contains_key(&entry.text.as_str().parse().unwrap()))
    );
    assert!(ranking.entries.is_sorted_by(|a, b| a.count >= b.count));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A few frequent keys among many rare ones, over several workers and generations.
    #[test]
    fn counts_are_right_or_too_high_by_at_most_their_error(
        stream in prop::collection::vec((0_usize..3, prop_oneof![0_u64..8, 0_u64..3000]), 0..6000),
        turn_at in 0_usize..6000,
    ) {
        let (workers, top) = new_rejection_counters(3);
        let (api, mut exact) = (policy_name("api"), Exact::new());
        top.rotate_generations_if_due(1);
        for (at, (worker, key)) in stream.into_iter().enumerate() {
            if at == turn_at {
                top.rotate_generations_if_due(1 + GENERATION_S);
            }
            workers[worker].record_key_rejection(&api, key.into(), || key.to_string());
            *exact.entry(key).or_default() += 1;
        }
        let ranking = rank_keys(&top, None);
        assert_ranking_bounds(&ranking, &exact);
        // The error bound of space-saving sketches, summed over all sketches.
        prop_assert!(ranking.unseen_at_most <= ranking.refused / SKETCH_CAPACITY as u64);
    }
}

#[test]
fn random_keys_use_bounded_memory_and_do_not_hide_heavy_keys() {
    let (workers, top) = new_rejection_counters(1);
    let api = policy_name("api");
    let mut random = fastrand::Rng::with_seed(7);
    for step in 0..200_000_u32 {
        workers[0]
            .record_key_rejection(&api, u128::from(random.u64(..)) << 8, || "x".repeat(10_000));
        workers[0].record_path_rejection(&api, &format!("/{}", random.u64(..)));
        if step % 100 == 0 {
            workers[0].record_key_rejection(&api, 1, || "bad".to_owned());
        }
    }
    let ranking = rank_keys(&top, None);
    assert_eq!(ranking.entries.len(), SKETCH_CAPACITY);
    let bad = ranking
        .entries
        .iter()
        .find(|entry| entry.text.as_str() == "bad")
        .unwrap();
    assert!(
        bad.count >= 2000 && bad.count - bad.error <= 2000,
        "{bad:?}"
    );
    assert!(
        ranking
            .entries
            .iter()
            .all(|entry| entry.text.as_str().len() <= MAX_TEXT_BYTES)
    );
    assert!(
        ranking
            .entries
            .iter()
            .any(|entry| entry.text.as_str().ends_with(TRUNCATION_MARK))
    );
    let sketch = &workers[0].paths.lock().current;
    assert_eq!(
        (
            sketch.positions.len(),
            sketch.items.len(),
            sketch.counts.len()
        ),
        (SKETCH_CAPACITY, SKETCH_CAPACITY, SKETCH_CAPACITY)
    );
}

#[test]
fn ranking_can_be_filtered_by_policy() {
    let (workers, top) = new_rejection_counters(2);
    let (a, b) = (policy_name("a"), policy_name("b"));
    for worker in &workers {
        worker.record_key_rejection(&a, 1, || "a/1".to_owned());
        worker.record_key_rejection(&b, 2, || "b/1".to_owned());
        worker.record_path_rejection(&a, "/same");
        worker.record_path_rejection(&b, "/same");
    }
    workers[0].record_path_rejection(&b, "/same");
    let ranking_of_b = rank_keys(&top, Some("b"));
    let texts: Vec<&str> = ranking_of_b
        .entries
        .iter()
        .map(|entry| entry.text.as_str())
        .collect();
    assert_eq!(
        (texts, ranking_of_b.entries[0].count, ranking_of_b.refused),
        (vec!["b/1"], 2, 4)
    );
    let paths = top.ranking(RejectionDimension::Paths, None, 1);
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
fn rejections_expire_after_two_generations() {
    let (workers, top) = new_rejection_counters(1);
    let api = policy_name("api");
    let add = |id: u128| workers[0].record_key_rejection(&api, id, || id.to_string());
    let ranked_keys = || {
        let ranking = rank_keys(&top, None);
        let mut texts: Vec<String> = ranking
            .entries
            .iter()
            .map(|entry| entry.text.as_str().to_owned())
            .collect();
        texts.sort();
        (texts.join(" "), ranking.since_s)
    };
    let start = 1_700_000_000;
    top.rotate_generations_if_due(start);
    add(1);
    top.rotate_generations_if_due(start + GENERATION_S - 1);
    assert_eq!(ranked_keys(), ("1".to_owned(), start));
    top.rotate_generations_if_due(start + GENERATION_S);
    add(2);
    assert_eq!(ranked_keys(), ("1 2".to_owned(), start));
    top.rotate_generations_if_due(start + 2 * GENERATION_S);
    assert_eq!(ranked_keys(), ("2".to_owned(), start + GENERATION_S));
    // A clock that steps back expires nothing.
    top.rotate_generations_if_due(start);
    assert_eq!(ranked_keys().0, "2");
    // A long pause leaves one generation, with its original start.
    top.rotate_generations_if_due(start + 9 * GENERATION_S);
    assert_eq!(ranked_keys(), (String::new(), start + 2 * GENERATION_S));
}

#[test]
fn paths_are_escaped_for_terminals_and_html() {
    let (workers, top) = new_rejection_counters(1);
    let api = policy_name("api");
    let hostile = [
        "/\u{1b}[31m",
        "/<script>\"`",
        "/\u{202e}\u{9b}\u{7f}\u{0}\r\n",
        &"/ü".repeat(300),
    ];
    for path in hostile {
        workers[0].record_path_rejection(&api, path);
    }
    for entry in top.ranking(RejectionDimension::Paths, None, 9).entries {
        assert!(
            entry
                .text
                .as_str()
                .bytes()
                .all(|byte| byte.is_ascii_graphic()),
            "{entry:?}"
        );
        assert!(
            !entry.text.as_str().contains(['<', '>', '"', '`', '\\']),
            "{entry:?}"
        );
        assert!(entry.text.as_str().len() <= MAX_TEXT_BYTES, "{entry:?}");
    }
}
