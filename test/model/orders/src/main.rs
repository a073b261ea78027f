// SPDX-License-Identifier: Apache-2.0
//! The memory orders of the words that processes share, checked in every execution that the C11 memory model allows, as
//! far as loom explores it (see README.md). checks.rs has the programs, table.rs the orders and the code they stand for.
//!
//! A check runs with the weakest order of each access at which it holds. So the code, whose orders are the same or
//! stronger, holds too. Then each access in turn gets an order that is one weaker, and the check must fail.
//!
//!     orders                 every check and every mutant
//!     orders CHECK           one check
//!     orders CHECK ACCESS    one mutant

mod checks;
mod table;
mod words;

use std::process::{Command, ExitCode};
use std::sync::Mutex;

use table::{weaker, ROWS};

const FAILED: i32 = 3; // the check's own verdict; a crash has another status

fn run(check: &str, mutant: Option<&str>) -> ! {
    let program = checks::PROGRAMS.iter().find(|p| p.0 == check).expect("no such check").1;
    std::panic::set_hook(Box::new(|p| {
        let text = p.to_string().replace('\n', " ");
        println!("{text}");
        let verdict = text.contains("order: ") || text.contains("Causality violation");
        std::process::exit(if verdict { FAILED } else { 1 });
    }));
    words::choose(check, mutant);
    loom::model::Builder::new().check(program);
    std::process::exit(0)
}

/// Whether a run in a process of its own ended as expected.
fn judge(check: &str, mutant: Option<&str>) -> bool {
    let out = Command::new(std::env::current_exe().unwrap()).arg(check).args(mutant).output().expect("a process");
    let expected = if mutant.is_some() { FAILED } else { 0 };
    let good = out.status.code() == Some(expected);
    let verdict = match out.status.code() {
        Some(0) => "holds ",
        Some(FAILED) => "caught",
        _ => "broken",
    };
    println!("{} {verdict} {check:<9} {}", if good { "ok " } else { "BAD" }, mutant.unwrap_or(""));
    if !good {
        println!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    }
    good
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(check) = args.first() {
        run(check, args.get(1).map(String::as_str));
    }
    let mut bad = table::missing_code();
    let mut runs: Vec<(&str, Option<&str>)> = checks::PROGRAMS.iter().map(|p| (p.0, None)).collect();
    runs.extend(ROWS.iter().filter(|r| weaker(r.needs).is_some()).map(|r| (r.check, Some(r.access))));
    let total = runs.len();
    let queue = Mutex::new(runs.into_iter());
    let worker = || {
        let mut failed = 0;
        loop {
            let next = queue.lock().unwrap().next();
            match next {
                Some((check, mutant)) => failed += usize::from(!judge(check, mutant)),
                None => return failed,
            }
        }
    };
    bad += std::thread::scope(|s| {
        let other = s.spawn(worker);
        worker() + other.join().unwrap()
    });
    if bad > 0 {
        println!("orders: {bad} did not end as expected");
        return ExitCode::FAILURE;
    }
    println!("orders: {} checks hold, {} weaker orders are caught", checks::PROGRAMS.len(), total - checks::PROGRAMS.len());
    ExitCode::SUCCESS
}
