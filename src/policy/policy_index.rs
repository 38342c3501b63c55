//! Finds the few candidate policies for a request or descriptor.

use super::coverage::{find_rarest_conditions, required_values};
use super::matcher::RequiredValue;
use super::path_pattern::{PatternSegment, PatternSegments, split_word};
use super::{Facts, KeyPart, PathPattern, Policy};
use foldhash::HashMap;
use foldhash::fast::RandomState;
use smallvec::SmallVec;
use std::hash::BuildHasher;

/// Finds candidates by one value of a part, and by path. The caller checks all conditions.
///
/// With thousands of policies most of the cost is that of memory that is in no cache. So the nodes
/// of all tries are in one table, without the words: words with equal hashes share a node, which
/// only adds candidates. The hash has a random key, so that no client chooses such words.
#[derive(Debug, Default)]
pub(super) struct PolicyIndex {
    /// The parts whose values are looked up, with the branches that have the values.
    parts: Vec<(KeyPart, usize)>,
    /// The policies that are found by path only, if there are any.
    unindexed: Option<IndexNode>,
    /// By the position of the parent, and the hash of a value or of a path segment.
    nodes: HashMap<(usize, u64), IndexNode>,
    branches: Vec<IndexBranch>,
    hasher: RandomState,
}

/// A node of a trie of path patterns.
#[derive(Clone, Copy, Debug)]
enum IndexNode {
    /// All patterns that begin with these segments are of the policy with this id.
    Policy(usize),
    /// The position of a branch.
    Branch(usize),
}

#[derive(Debug, Default)]
struct IndexBranch {
    wildcard: Option<IndexNode>,
    /// Ids of the policies with patterns that end here.
    terminal_ids: Vec<usize>,
    /// Ids of the policies with patterns that end here with `**`.
    suffix_wildcard_ids: Vec<usize>,
}

/// What follows a node in patterns, with the ids of their policies.
type PatternTails<'p> = Vec<(PatternSegments<'p>, usize)>;

impl PolicyIndex {
    /// Indexes each policy by the exact condition that it shares with the fewest policies.
    /// Thousands of policies may share a host and differ in a header, or share a header and differ
    /// in the host.
    pub(super) fn from_policies(policies: &[Policy]) -> Self {
        let conditions = policies.iter().map(|policy| {
            let mut conditions = required_values(&policy.matcher);
            conditions.retain(|values| values.iter().all(is_found_in_facts));
            conditions
        });
        let rarest = find_rarest_conditions(conditions.collect());
        let mut index = Self::default();
        let mut unindexed = PatternTails::new();
        let mut by_part: HashMap<&KeyPart, HashMap<u64, PatternTails<'_>>> = HashMap::default();
        for (id, (policy, values)) in policies.iter().zip(rarest).enumerate() {
            let patterns = policy.matcher.path_patterns();
            let any_path = patterns.is_empty().then_some(PatternSegments::OF_ANY_PATH);
            let tails = patterns.iter().map(PathPattern::segments).chain(any_path);
            let tails = tails.map(|tail| (tail, id));
            let Some(values) = values else {
                unindexed.extend(tails);
                continue;
            };
            for value in values {
                if let RequiredValue::Value(part, value) = value {
                    let by_value = by_part.entry(part).or_default();
                    let hash = index.hasher.hash_one(value.as_bytes());
                    by_value.entry(hash).or_default().extend(tails.clone());
                }
            }
        }
        index.unindexed = (!unindexed.is_empty()).then(|| index.add_node(unindexed));
        for (part, by_value) in by_part {
            let position = index.add_branch(IndexBranch::default(), by_value);
            index.parts.push((part.clone(), position));
        }
        index
    }

    /// Adds the node of patterns that begin alike.
    fn add_node(&mut self, tails: PatternTails<'_>) -> IndexNode {
        if let [(_, id), others @ ..] = &*tails
            && others.iter().all(|(_, other)| other == id)
        {
            return IndexNode::Policy(*id);
        }
        let mut branch = IndexBranch::default();
        let mut literals: HashMap<u64, PatternTails<'_>> = HashMap::default();
        let mut wildcards = PatternTails::new();
        for (mut tail, id) in tails {
            match tail.next() {
                Some(PatternSegment::Literal(word)) => {
                    let hash = self.hasher.hash_one(word.as_bytes());
                    literals.entry(hash).or_default().push((tail, id));
                }
                Some(PatternSegment::Wildcard { .. }) => wildcards.push((tail, id)),
                Some(PatternSegment::AnySuffix) => branch.suffix_wildcard_ids.push(id),
                None => branch.terminal_ids.push(id),
            }
        }
        branch.wildcard = (!wildcards.is_empty()).then(|| self.add_node(wildcards));
        IndexNode::Branch(self.add_branch(branch, literals))
    }

    /// Adds a branch with its children by hash, and returns its position.
    fn add_branch(
        &mut self,
        branch: IndexBranch,
        children: HashMap<u64, PatternTails<'_>>,
    ) -> usize {
        let position = self.branches.len();
        self.branches.push(branch);
        for (hash, tails) in children {
            let child = self.add_node(tails);
            self.nodes.insert((position, hash), child);
        }
        position
    }

    /// The ids of the candidates in ascending order, without duplicates.
    pub(super) fn find_candidates(&self, facts: &Facts<'_>) -> SmallVec<[usize; 16]> {
        let mut found = SmallVec::new();
        let mut add = |root: IndexNode| {
            for path in facts.paths.iter() {
                self.collect_candidates(root, path, &mut found);
            }
        };
        self.unindexed.into_iter().for_each(&mut add);
        for (part, position) in &self.parts {
            part.read_values(facts, |values| {
                let roots = values.filter_map(|value| self.find_child(*position, &value));
                roots.for_each(&mut add);
            });
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    fn collect_candidates(&self, node: IndexNode, path: &str, found: &mut SmallVec<[usize; 16]>) {
        let position = match node {
            IndexNode::Policy(id) => return found.push(id),
            IndexNode::Branch(position) => position,
        };
        let Some(branch) = self.branches.get(position) else {
            return;
        };
        found.extend_from_slice(&branch.suffix_wildcard_ids);
        let Some(path) = path.strip_prefix('/') else {
            return found.extend_from_slice(&branch.terminal_ids);
        };
        let (word, rest) = split_word(path);
        if let Some(child) = self.find_child(position, word.as_bytes()) {
            self.collect_candidates(child, rest, found);
        }
        if let Some(child) = branch.wildcard.filter(|_| !word.is_empty()) {
            self.collect_candidates(child, rest, found);
        }
    }

    fn find_child(&self, position: usize, value: &[u8]) -> Option<IndexNode> {
        let key = (position, self.hasher.hash_one(value));
        self.nodes.get(&key).copied()
    }
}

/// Whether [`PolicyIndex`] looks up the value in a request or descriptor.
fn is_found_in_facts(value: &RequiredValue<'_>) -> bool {
    match value {
        RequiredValue::Value(KeyPart::Host, name) => !name.starts_with('.'),
        RequiredValue::Value(part, _) => matches!(
            part,
            KeyPart::Header(_) | KeyPart::DescriptorEntry(_) | KeyPart::DescriptorDomain
        ),
        _ => false,
    }
}
