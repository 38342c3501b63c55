//! `tidegate completions` and `tidegate man`: generated from the command definitions.

use clap::CommandFactory;

/// Returns the completion script for `shell`.
pub(super) fn generate_completions(shell: clap_complete::Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(
        shell,
        &mut super::CommandLine::command(),
        "tidegate",
        &mut script,
    );
    String::from_utf8_lossy(&script).into_owned()
}

/// Returns one manual page: the program, then each command.
///
/// # Errors
/// A message for the user if rendering fails. Rendering into memory does not fail in practice.
pub(super) fn generate_manual() -> Result<String, String> {
    let mut program = super::CommandLine::command();
    program.build();
    let mut page = Vec::new();
    let format_error = |error: std::io::Error| error.to_string();
    clap_mangen::Man::new(program.clone())
        .render(&mut page)
        .map_err(format_error)?;
    for command in program
        .get_subcommands()
        .filter(|command| command.get_name() != "help")
    {
        page.extend_from_slice(
            format!(".SH COMMAND {}\n", command.get_name().to_uppercase()).as_bytes(),
        );
        let man = clap_mangen::Man::new(command.clone());
        man.render_synopsis_section(&mut page)
            .map_err(format_error)?;
        man.render_description_section(&mut page)
            .map_err(format_error)?;
        man.render_options_section(&mut page)
            .map_err(format_error)?;
        man.render_extra_section(&mut page).map_err(format_error)?;
    }
    Ok(String::from_utf8_lossy(&page).into_owned())
}
