//! The `tpusim` command.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use tpusim::cli::{Cli, Outcome};
use tpusim::config::ConfigError;
use tpusim::study::RunError;

/// Exit code of a check that failed: a validation, an invariant.
const CHECK_FAILED: u8 = 1;
/// Exit code of bad input or usage.
const BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    match Cli::parse().execute() {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::CheckFailed) => ExitCode::from(CHECK_FAILED),
        Err(error) => {
            // A reader that has seen enough, such as `head`, is no failure.
            if error.chain().any(is_closed_pipe) {
                return ExitCode::SUCCESS;
            }
            let mut stderr = io::stderr().lock();
            // Nothing is left to tell if stderr is gone.
            let _ = match config_error(&error) {
                Some(config) => writeln!(stderr, "{}", config.render().trim_end()),
                None => writeln!(stderr, "error: {error:#}"),
            };
            match error.downcast_ref::<RunError>() {
                Some(RunError::Invariant { .. }) => ExitCode::from(CHECK_FAILED),
                _ => ExitCode::from(BAD_INPUT),
            }
        }
    }
}

/// Whether the reader of the output has gone. The formats wrap that each in its own way.
fn is_closed_pipe(cause: &(dyn std::error::Error + 'static)) -> bool {
    let kind = if let Some(error) = cause.downcast_ref::<csv::Error>() {
        match error.kind() {
            csv::ErrorKind::Io(error) => Some(error.kind()),
            _ => None,
        }
    } else if let Some(error) = cause.downcast_ref::<serde_json::Error>() {
        error.io_error_kind()
    } else {
        cause.downcast_ref::<io::Error>().map(io::Error::kind)
    };
    kind == Some(io::ErrorKind::BrokenPipe)
}

fn config_error(error: &anyhow::Error) -> Option<&ConfigError> {
    match error.downcast_ref::<RunError>() {
        Some(RunError::Config(config)) => Some(config),
        _ => error.downcast_ref::<ConfigError>(),
    }
}
