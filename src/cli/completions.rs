//! `tpusim completions` and `tpusim man`: what shells and `man` want to know of the command line, made from its definition.

use std::io::Write;

use anyhow::bail;
use clap::{Args, Command};
use clap_complete::Shell;

use super::Outcome;
use crate::config::suggestion;

/// Arguments of `tpusim completions`.
#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// Shell to complete in
    shell: Shell,
}

/// Arguments of `tpusim man`.
#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// Command to print the page of, such as `run` or `hw show`; the program itself where absent
    command: Vec<String>,
}

/// Prints the completion script of a shell.
pub(super) fn completions(
    out: &mut impl Write,
    args: &CompletionsArgs,
    mut program: Command,
) -> anyhow::Result<Outcome> {
    // The generator has no way to say that the reader has gone.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "tpusim", &mut script);
    out.write_all(&script)?;
    Ok(Outcome::Done)
}

/// Prints a page of the manual.
pub(super) fn man(out: &mut impl Write, args: &ManArgs, mut program: Command) -> anyhow::Result<Outcome> {
    // Gives commands the names of their pages, such as `tpusim-hw-show`.
    program.build();
    let mut command = &program;
    for name in &args.command {
        let Some(found) = command.find_subcommand(name) else {
            let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
            if names.is_empty() {
                bail!("`{}` has no commands of its own", command.get_name());
            }
            bail!(
                "unknown command `{name}`; {}",
                suggestion(name, &names, "commands")
            );
        };
        command = found;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    out.write_all(&page)?;
    Ok(Outcome::Done)
}
