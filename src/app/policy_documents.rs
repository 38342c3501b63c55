//! Describes active policies for the admin endpoint.

use super::key_status::{describe_limit, micros_to_seconds};
use crate::admin::{LeaseDocument, PolicyDocument, QuotaDocument};
use crate::policy::{OnStoreFailure, Policy, PolicyAction, Quota};
use serde_json::json;

/// Completes the document of an active policy.
pub(super) fn describe_policy(policy: &Policy, described: PolicyDocument) -> PolicyDocument {
    let action = match policy.action {
        PolicyAction::Allow => "allow",
        PolicyAction::Deny => "deny",
        PolicyAction::Limit(_) => "limit",
    };
    PolicyDocument {
        mode: policy.mode.name().to_owned(),
        priority: Some(policy.priority),
        action: Some(action.to_owned()),
        quota: policy.quota().map(|quota| describe_quota(policy, quota)),
        ..described
    }
}

fn describe_quota(policy: &Policy, quota: &Quota) -> QuotaDocument {
    let on_store_failure = match policy.on_store_failure {
        _ if quota.is_instance_scoped() => None,
        OnStoreFailure::Open => Some("open"),
        OnStoreFailure::Closed => Some("closed"),
        OnStoreFailure::Local => Some("local"),
    };
    QuotaDocument {
        key: quota.key.describe_positions(),
        limits: quota.limits.iter().map(describe_limit).collect(),
        overrides: quota.overrides.as_slice().len(),
        dynamic: quota.is_dynamic,
        scope: quota.key.scope.name().to_owned(),
        counter: quota.key.counter_name().map(str::to_owned),
        on_store_failure: on_store_failure.map(str::to_owned),
        block_s: quota.block.map(|block| micros_to_seconds(block.per_us)),
        lease: quota.lease.map(|lease| LeaseDocument {
            size: lease.size.map_or(json!("auto"), |size| json!(size)),
            ttl_s: micros_to_seconds(lease.ttl_us),
        }),
    }
}
