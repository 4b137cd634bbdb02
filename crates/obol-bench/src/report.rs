//! The table, for people and as JSON.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::driver::Load;
use crate::measure::{Measured, Target};
use crate::work::Work;

/// Everything that one run found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// How long each cell was measured.
    seconds: f64,
    processors: Option<usize>,
    /// Of the minute before the run: how busy the machine was with other things.
    load_before: Option<f64>,
    cells: Vec<Cell>,
}

/// One target under one load.
#[derive(Debug, Serialize)]
pub(crate) struct Cell {
    work: Work,
    clients: usize,
    target: Target,
    requests: usize,
    rps: f64,
    /// Throughput as a share of the same load without anything between.
    of_direct: Option<f64>,
    /// Throughput as a share of the floor's.
    of_floor: Option<f64>,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    /// Processor seconds of the process between client and upstream for 1,000 requests.
    cpu_s_per_1000: Option<f64>,
    /// That, in floors.
    cpu_of_floor: Option<f64>,
    redis_cpu_s_per_1000: Option<f64>,
    rss_mib: Option<f64>,
    pub(crate) wrong: u64,
    pub(crate) example: Option<String>,
}

impl Cell {
    pub(crate) fn new(target: Target, load: Load, measured: &Measured) -> Self {
        let requests = measured.seen.latencies.len();
        let per_1000 = |cpu: Option<Duration>| {
            cpu.filter(|_| requests > 0).map(|cpu| cpu.as_secs_f64() * 1000.0 / count(requests))
        };
        let percentile =
            |percent| percentile(&measured.seen.latencies, percent).map(|micros| f64::from(micros) / 1000.0);
        Self {
            work: load.work,
            clients: load.clients,
            target,
            requests,
            rps: ratio(count(requests), measured.took.as_secs_f64()).unwrap_or_default(),
            of_direct: None,
            of_floor: None,
            p50_ms: percentile(50),
            p99_ms: percentile(99),
            cpu_s_per_1000: per_1000(measured.cpu),
            cpu_of_floor: None,
            redis_cpu_s_per_1000: per_1000(measured.redis_cpu),
            rss_mib: measured.rss.map(mib),
            wrong: measured.seen.wrong,
            example: measured.seen.example.clone(),
        }
    }
}

impl Report {
    pub(crate) fn new(seconds: Duration, load_before: Option<f64>) -> Self {
        let processors = std::thread::available_parallelism().ok().map(std::num::NonZero::get);
        Self { seconds: seconds.as_secs_f64(), processors, load_before, cells: Vec::new() }
    }

    /// Adds a cell, compared with those of the same load that are there already.
    pub(crate) fn add(&mut self, mut cell: Cell) {
        let of = |target: Target| {
            let same = |other: &&Cell| {
                other.target == target && other.work == cell.work && other.clients == cell.clients
            };
            if cell.target == target { Some(&cell) } else { self.cells.iter().find(same) }
        };
        let (direct, floor) = (of(Target::Direct), of(Target::Floor));
        let of_direct = direct.and_then(|direct| ratio(cell.rps, direct.rps));
        let of_floor = floor.and_then(|floor| ratio(cell.rps, floor.rps));
        let cpu_of_floor = floor.and_then(|floor| ratio(cell.cpu_s_per_1000?, floor.cpu_s_per_1000?));
        (cell.of_direct, cell.of_floor, cell.cpu_of_floor) = (of_direct, of_floor, cpu_of_floor);
        self.cells.push(cell);
    }

    /// No answer was wrong, and every cell has answers.
    pub(crate) fn is_right(&self) -> bool {
        self.cells.iter().all(|cell| cell.wrong == 0 && cell.requests > 0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let processors = self.processors.map_or_else(|| "?".to_owned(), |n| n.to_string());
        writeln!(
            f,
            "\ndirect: no gateway. floor: a bare reverse proxy. obol: with Redis, keys, sessions, policies, usage and logs \
             on. budgets: with rates and three budgets as well. memory: that in one process, without Redis.\n{} s per cell on {processors} processors shared by all; load before: {}.",
            self.seconds,
            cell_text(self.load_before, 1, "")
        )?;
        let mut above = None;
        for cell in &self.cells {
            if above != Some((cell.work, cell.clients)) {
                if above.is_none_or(|(work, _)| work != cell.work) {
                    writeln!(f, "\n{}\n{HEAD}", cell.work.title())?;
                } else {
                    writeln!(f)?;
                }
                above = Some((cell.work, cell.clients));
            }
            row(f, cell)?;
        }
        if !self.is_right() {
            writeln!(f, "\nWRONG: there were wrong answers, or none. These figures are worth nothing.")?;
        }
        Ok(())
    }
}

const HEAD: &str = "clients  target     req/s  of direct  of floor   p50 ms   p99 ms  CPU s/1,000   × floor  Redis CPU s/1,000  RSS MiB";

fn row(f: &mut fmt::Formatter<'_>, cell: &Cell) -> fmt::Result {
    let percent = |share: Option<f64>| cell_text(share.map(|share| share * 100.0), 1, " %");
    writeln!(
        f,
        "{:>7}  {:<7}  {:>7.0}  {:>9}  {:>8}  {:>7}  {:>7}  {:>11}  {:>8}  {:>17}  {:>7}{}",
        cell.clients,
        cell.target.title(),
        cell.rps,
        percent(cell.of_direct),
        percent(cell.of_floor),
        cell_text(cell.p50_ms, 2, ""),
        cell_text(cell.p99_ms, 2, ""),
        cell_text(cell.cpu_s_per_1000, 4, ""),
        cell_text(cell.cpu_of_floor, 1, ""),
        cell_text(cell.redis_cpu_s_per_1000, 4, ""),
        cell_text(cell.rss_mib, 1, ""),
        if cell.wrong > 0 { format!("  {} WRONG", cell.wrong) } else { String::new() },
    )
}

fn cell_text(value: Option<f64>, digits: usize, unit: &str) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}{unit}"))
}

/// The smallest value that `percent` of all values do not exceed (nearest rank).
fn percentile(sorted: &[u32], percent: usize) -> Option<u32> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

#[expect(clippy::cast_precision_loss, reason = "counts of one run are far below 2^52")]
fn count(number: usize) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "memory of a process is far below 2^52 bytes")]
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Seen;

    fn cell(target: Target, requests: u32, cpu_ms: u64) -> Cell {
        let load =
            Load { work: Work::Chat, clients: 32, warm_up: Duration::ZERO, seconds: Duration::from_secs(1) };
        let measured = Measured {
            seen: Seen { latencies: (1..=requests).collect(), ..Seen::default() },
            took: Duration::from_secs(2),
            cpu: (target != Target::Direct).then(|| Duration::from_millis(cpu_ms)),
            redis_cpu: None,
            rss: Some(3 << 20),
        };
        Cell::new(target, load, &measured)
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let hundred: Vec<u32> = (1..=100).collect();
        assert_eq!((percentile(&hundred, 50), percentile(&hundred, 99)), (Some(50), Some(99)));
        assert_eq!((percentile(&[7], 50), percentile(&[7], 99)), (Some(7), Some(7)));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn a_cell_is_compared_with_its_own_load_only() {
        let mut report = Report::new(Duration::from_secs(1), None);
        report.add(Cell { clients: 1, ..cell(Target::Direct, 10, 0) });
        report.add(cell(Target::Direct, 1000, 0));
        report.add(cell(Target::Floor, 500, 100));
        report.add(cell(Target::Obol, 250, 100));
        let obol = report.cells.last().unwrap();
        assert_eq!((obol.of_direct, obol.of_floor, obol.cpu_of_floor), (Some(0.25), Some(0.5), Some(2.0)));
        assert_eq!((obol.rps, obol.cpu_s_per_1000, obol.rss_mib), (125.0, Some(0.4), Some(3.0)));
        let text = report.to_string();
        assert!(text.contains("     32  obol         125     25.0 %    50.0 %"), "{text}");
    }

    #[test]
    fn one_wrong_answer_or_no_answer_spoils_the_run() {
        let mut report = Report::new(Duration::from_secs(1), None);
        report.add(cell(Target::Direct, 10, 0));
        assert!(report.is_right());
        report.add(Cell { wrong: 1, ..cell(Target::Floor, 10, 10) });
        assert!(!report.is_right());
        assert!(report.to_string().contains("1 WRONG"));
        let mut report = Report::new(Duration::from_secs(1), None);
        report.add(cell(Target::Direct, 0, 0));
        assert!(!report.is_right());
    }
}
