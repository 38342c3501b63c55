//! Configuration: builds the settings of every module from a file, the environment and flags.
//!
//! An outer adapter: it depends on the modules it configures, and they do not depend on it.
//! `schema` lists the keys, `layers` merges the sources, `table_reader` reads values and
//! collects every error with its position, `settings` and `policies` build the result.

mod credentials;
mod describe;
mod diagnostic;
mod document;
mod effective_config;
mod files;
mod input;
mod json_schema;
mod layers;
mod lints;
mod loaded_config;
mod policies;
#[cfg(any(test, fuzzing))]
pub mod properties;
#[cfg(test)]
mod reference_page;
mod schema;
mod schema_value;
mod settings;
mod sources;
mod suggestions;
mod table_reader;
#[cfg(test)]
mod tests;
mod value_tree;
mod values;

pub use credentials::{CredentialSource, Credentials};
pub use describe::PolicyDescription;
pub use diagnostic::{
    ConfigDiagnostic, DiagnosticGroup, DiagnosticSeverity, SourcePosition, SourceSpan,
    group_diagnostics,
};
pub use input::{ConfigErrors, FileSet, read_config_file};
pub use json_schema::json_schema;
pub use loaded_config::{Config, RestartOnlySettings, StoreSettings};
pub use sources::{ConfigSources, FileSource, FlagOverrides};
pub(crate) use values::parse_duration;
pub use values::{format_duration, format_period};

use crate::admin::AdminSettings;
use input::ConfigInput;
use layers::{apply_overrides, find_url, resolve_store_kind};
use table_reader::TableReader;

/// Loads and validates a configuration.
///
/// # Errors
/// [`ConfigErrors`] with all errors.
pub fn load(sources: &ConfigSources) -> Result<Config, ConfigErrors> {
    let mut input = ConfigInput::new(sources.skips_key_files);
    let Some(mut raw) = files::read_main_file(&mut input, &sources.file) else {
        // Diagnostics of the readable part of a broken file would mislead.
        return input.into_load_result(None, |config: Config, _, _| config);
    };
    let file_has_url = find_url(&raw).is_some();
    apply_overrides(&input, &mut raw, &sources.env, &sources.flags);
    resolve_store_kind(&input, file_has_url, &mut raw);
    let included = files::read_included_files(&mut input, &raw, &sources.file);
    let built = {
        let top = TableReader::from_root(&input, &schema::ROOT, &raw);
        let open = |root| TableReader::from_root(&input, &schema::INCLUDED_ROOT, root);
        let included: Vec<TableReader<'_>> = included.iter().map(open).collect();
        settings::build_config(&top, &included)
    };
    included.into_iter().for_each(|one| raw.add_policies(one));
    input.into_load_result(built, |config, warnings, files| Config {
        warnings,
        files,
        raw,
        ..config
    })
}

/// Loads only the settings of the admin listener. CLI commands use it to find a running proxy even
/// if the rest of the configuration is invalid.
///
/// # Errors
/// [`ConfigErrors`] if the main file is not TOML or `[admin]` is invalid.
pub fn load_admin_settings(sources: &ConfigSources) -> Result<AdminSettings, ConfigErrors> {
    let mut input = ConfigInput::default();
    let Some(mut root) = files::read_main_file(&mut input, &sources.file) else {
        return input.into_load_result(None, |admin, _, _| admin);
    };
    // Errors in other tables are not reported here.
    if let Some(tables) = root.table_mut() {
        tables.retain(|name, _| name == "admin");
    }
    let mut env = sources.env.clone();
    env.retain(|(name, _)| name.starts_with("TIDEGATE_ADMIN__"));
    apply_overrides(&input, &mut root, &env, &FlagOverrides::default());
    let built = settings::build_admin_settings(
        &TableReader::from_root(&input, &schema::ROOT, &root).get_table("admin"),
    );
    input.into_load_result(built, |admin, _, _| admin)
}
