//! The run: for each kind of work and each number of clients, all targets one right after the other, so that whatever
//! else the machine does touches all of them alike.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use obol_testkit::Failure;
use serde::Serialize;
use tokio::time::Instant;

use crate::driver::{Crowd, Door, Load, Seen};
use crate::installation::Installation;
use crate::procfs::{self, Process};
use crate::report::{Cell, Report};
use crate::work::Work;

/// Between two looks at a process's memory.
const LOOK: Duration = Duration::from_millis(100);

/// The longest cell: the whole run has to stay bounded.
const LONGEST_S: f64 = 600.0;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How long each cell of the table is measured, in seconds.
    #[arg(long, default_value = "4", value_parser = seconds)]
    seconds: Duration,
    /// How long each cell runs before it is measured, in seconds.
    #[arg(long, default_value = "1", value_parser = seconds)]
    warm_up: Duration,
    /// A first look: short cells, at most 32 clients.
    #[arg(long)]
    quick: bool,
    /// Numbers of concurrent clients.
    #[arg(long, value_delimiter = ',', default_value = "1,32,256", value_parser = clap::value_parser!(u16).range(1..=4096))]
    clients: Vec<u16>,
    /// Kinds of work; by default all.
    #[arg(long, value_delimiter = ',')]
    work: Vec<Work>,
    /// Targets; by default all.
    #[arg(long, value_delimiter = ',')]
    target: Vec<Target>,
    /// Also writes everything as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The `obol` binary; by default the one beside this program.
    #[arg(long)]
    obol: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let range = || format!("a number of seconds up to {LONGEST_S}");
    let seconds: f64 = text.parse().map_err(|_| range())?;
    if !(0.0..=LONGEST_S).contains(&seconds) {
        return Err(range());
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| range())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Target {
    /// No gateway at all.
    Direct,
    /// The proxy that looks at nothing.
    Floor,
    /// Obol with Redis, and everything on but budgets.
    Obol,
    /// The same with rates, concurrency and three budgets to be held.
    Budgets,
    /// The same as `budgets` in one process, `obol dev`: the ledger is in memory, so that what is missing is what Redis costs.
    Memory,
}

impl Target {
    const ALL: [Self; 5] = [Self::Direct, Self::Floor, Self::Obol, Self::Budgets, Self::Memory];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Floor => "floor",
            Self::Obol => "obol",
            Self::Budgets => "budgets",
            Self::Memory => "memory",
        }
    }
}

pub(crate) async fn run(mut options: Options) -> Result<ExitCode, Failure> {
    if options.quick {
        options.seconds = options.seconds.min(Duration::from_secs(1));
        options.warm_up = options.warm_up.min(Duration::from_millis(300));
        options.clients.retain(|&clients| clients <= 32);
    }
    let targets = if options.target.is_empty() { Target::ALL.to_vec() } else { options.target.clone() };
    let works = if options.work.is_empty() { Work::ALL.to_vec() } else { options.work.clone() };
    let cells = works.len() * options.clients.len() * targets.len();
    let load = procfs::load_average();
    let about = (options.seconds + options.warm_up).as_secs_f64()
        * f64::from(u32::try_from(cells).unwrap_or(u32::MAX));
    note(&format!("{cells} cells, about {about:.0} s; Ctrl-C ends it"));
    let installation = Installation::start(&targets, options.obol.as_deref()).await?;
    tell(&installation, &targets)?;

    let mut report = Report::new(options.seconds, load);
    for work in works {
        for &clients in &options.clients {
            for &target in &targets {
                let load = Load {
                    work,
                    clients: usize::from(clients),
                    warm_up: options.warm_up,
                    seconds: options.seconds,
                };
                note(&format!("{}, {clients} clients, {} …", work.title(), target.title()));
                let cell = cell(&installation, target, load).await?;
                if let Some(example) = &cell.example {
                    note(&format!("{} wrong answers, the first: {example}", cell.wrong));
                }
                report.add(cell);
            }
        }
    }
    drop(installation);

    write!(std::io::stdout(), "{report}").ok();
    if let Some(file) = &options.json {
        let failed =
            |why: &dyn std::fmt::Display| Failure::new(format!("cannot write `{}`: {why}", file.display()));
        let json = serde_json::to_vec_pretty(&report).map_err(|why| failed(&why))?;
        std::fs::write(file, json).map_err(|why| failed(&why))?;
    }
    Ok(if report.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What somebody with a profiler wants to know, and what everything costs that is asked for nothing.
fn tell(installation: &Installation, targets: &[Target]) -> Result<(), Failure> {
    for &target in targets {
        if let Some(process) = installation.between(target) {
            let idle = crate::report::mib(process.rss()?);
            note(&format!("{} is process {}, idle it holds {idle:.1} MiB", target.title(), process.id()));
        }
    }
    if let Some(logs) = installation.logs() {
        note(&format!("obol logs to {}", logs.display()));
    }
    Ok(())
}

async fn cell(installation: &Installation, target: Target, load: Load) -> Result<Cell, Failure> {
    let door = installation.door(target)?;
    let (between, redis) = (installation.between(target), installation.redis(target));
    let measured = measure(&door, load, between, redis).await?;
    Ok(Cell::new(target, load, &measured))
}

/// What one cell came to.
pub(crate) struct Measured {
    pub(crate) seen: Seen,
    /// Between the two looks at the clock, which is where processor time was read too.
    pub(crate) took: Duration,
    pub(crate) cpu: Option<Duration>,
    pub(crate) redis_cpu: Option<Duration>,
    /// The most that was seen.
    pub(crate) rss: Option<u64>,
}

async fn measure(
    door: &Door,
    load: Load,
    between: Option<Process>,
    redis: Option<Process>,
) -> Result<Measured, Failure> {
    let crowd = Crowd::gather(door, load).await?;
    let mut looks = Vec::with_capacity(2);
    let running = crowd.run(|| {
        let cpu = |process: Option<Process>| process.map(Process::cpu).transpose();
        looks.push((Instant::now(), cpu(between)?, cpu(redis)?));
        Ok(())
    });
    let (seen, rss) = with_memory(between, running).await?;
    let [before, after] = looks.as_slice() else {
        return Err(Failure::new("the window was not looked at twice"));
    };
    let spent = |before: Option<Duration>, after: Option<Duration>| Some(after?.saturating_sub(before?));
    Ok(Measured {
        seen,
        took: after.0 - before.0,
        cpu: spent(before.1, after.1),
        redis_cpu: spent(before.2, after.2),
        rss,
    })
}

/// Runs to the end while looking at a process's memory.
async fn with_memory(
    process: Option<Process>,
    running: impl Future<Output = Result<Seen, Failure>>,
) -> Result<(Seen, Option<u64>), Failure> {
    let mut most = None;
    let mut tick = tokio::time::interval(LOOK);
    tokio::pin!(running);
    loop {
        tokio::select! {
            seen = &mut running => return Ok((seen?, most)),
            _ = tick.tick() => most = most.max(process.map(Process::rss).transpose()?),
        }
    }
}

/// Progress: not part of the result.
fn note(text: &str) {
    writeln!(std::io::stderr(), "{text}").ok();
}
