//! Credentials in files: they are read again even while the rest of the configuration is invalid.

use super::input::{ConfigErrors, ConfigInput, FileSet};
use super::loaded_config::{Config, StoreSettings};
use super::schema::{self, AppliedAt};
use super::schema_value::content_or_default;
use super::settings;
use super::table_reader::TableReader;
use super::value_tree::{ValueContent, ValueNode};
use crate::admin::AdminToken;
use crate::store::redis::RedisSettings;
use std::path::PathBuf;

/// Logins and TLS of Redis, and the admin token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The settings that contain the logins and TLS. `None` without Redis.
    pub redis: Option<RedisSettings>,
    pub admin_token: Option<AdminToken>,
}

/// The keys of a valid configuration that name credentials, and their files.
#[derive(Clone, Debug)]
pub struct CredentialSource {
    raw: ValueNode,
    pub files: FileSet,
}

impl Config {
    /// The credentials of this configuration.
    pub fn credentials(&self) -> Credentials {
        Credentials {
            redis: match &self.store {
                StoreSettings::Redis(redis) => Some((**redis).clone()),
                StoreSettings::Memory(_) => None,
            },
            admin_token: self.admin.token.clone(),
        }
    }

    /// Where the credentials of this configuration come from.
    pub fn credential_source(&self) -> CredentialSource {
        let paths = credential_values(&self.raw, |_| true).map(PathBuf::from);
        let paths = paths.filter(|path| self.files.files.contains(path));
        CredentialSource {
            raw: self.raw.clone(),
            files: FileSet {
                files: paths.collect(),
                globs: Vec::new(),
            },
        }
    }
}

/// The values of the credential keys whose path `is_wanted`.
fn credential_values(
    raw: &ValueNode,
    is_wanted: impl Fn(&str) -> bool,
) -> impl Iterator<Item = String> {
    let leaves = schema::leaf_keys().into_iter();
    leaves
        .filter(move |leaf| leaf.applied_at == AppliedAt::CredentialReload && is_wanted(&leaf.path))
        .filter_map(|leaf| match content_or_default(raw, &leaf)? {
            ValueContent::Text(text) => Some(text),
            _ => None,
        })
}

impl Credentials {
    /// Whether `newer` has credentials for the same Redis servers.
    pub fn is_for_same_servers(&self, newer: &Self) -> bool {
        match (&self.redis, &newer.redis) {
            (Some(running), Some(newer)) => {
                running.servers == newer.servers
                    && running.sentinel_master() == newer.sentinel_master()
                    && running.tls.is_some() == newer.tls.is_some()
            }
            (running, newer) => running.is_none() && newer.is_none(),
        }
    }
}

impl CredentialSource {
    /// Whether a login to Redis comes from a file that `config` names, too.
    pub fn shares_login_files_with(&self, config: &Config) -> bool {
        let is_login = |key: &str| key.starts_with("store.redis.") && key.ends_with("_file");
        let paths = credential_values(&self.raw, is_login).map(PathBuf::from);
        let mut paths = paths.filter(|path| self.files.files.contains(path));
        paths.any(|path| config.files.files.contains(&path))
    }

    /// Reads the files of Redis again. Returns `None` if Redis is not the store.
    ///
    /// # Errors
    /// [`ConfigErrors`] if a file is unreadable or invalid.
    pub fn load_redis(&self) -> Result<Option<RedisSettings>, ConfigErrors> {
        self.load_with(|root| {
            let store = root.get_table("store");
            let uses_redis = store.is_keyword("kind", "redis")?;
            let memory = settings::build_memory_settings(&store.get_table("memory"))?;
            let redis = store.get_table("redis");
            let redis = settings::build_redis_settings(&redis, uses_redis, memory)?;
            Some(uses_redis.then_some(redis))
        })
    }

    /// Reads the file of the admin token again.
    ///
    /// # Errors
    /// [`ConfigErrors`] if the file is unreadable or invalid.
    pub fn load_admin_token(&self) -> Result<Option<AdminToken>, ConfigErrors> {
        self.load_with(|root| {
            let admin = settings::build_admin_settings(&root.get_table("admin"))?;
            Some(admin.token)
        })
    }

    fn load_with<T>(
        &self,
        build: impl FnOnce(&TableReader<'_>) -> Option<T>,
    ) -> Result<T, ConfigErrors> {
        let input = ConfigInput::default();
        let root = TableReader::from_root(&input, &schema::ROOT, &self.raw);
        let built = build(&root);
        input.into_load_result(built, |built, _, _| built)
    }
}
