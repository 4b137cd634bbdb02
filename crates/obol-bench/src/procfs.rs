//! What the kernel knows of a process: processor time and memory.

use std::fs;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};
use obol_testkit::Failure;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A running process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process {
    id: u32,
}

impl Process {
    pub(crate) fn new(id: u32) -> Self {
        Self { id }
    }

    /// The Redis that listens there, which says itself which process it is.
    pub(crate) async fn of_redis(addr: std::net::SocketAddr) -> Result<Self, Failure> {
        let failed =
            |why: &dyn std::fmt::Display| Failure::new(format!("cannot ask Redis for its process: {why}"));
        let ask = async {
            let mut stream = TcpStream::connect(addr).await?;
            stream.write_all(b"INFO server\r\nQUIT\r\n").await?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.map(|_| text)
        };
        let text =
            timeout(Duration::from_secs(5), ask).await.map_err(|e| failed(&e))?.map_err(|e| failed(&e))?;
        let id = text.lines().find_map(|line| line.strip_prefix("process_id:")?.trim().parse().ok());
        id.map(Self::new).ok_or_else(|| failed(&"it does not say"))
    }

    pub(crate) fn id(self) -> u32 {
        self.id
    }

    /// Processor time so far, of all threads, in user and kernel mode. Its unit is the clock tick, about 10 ms.
    pub(crate) fn cpu(self) -> Result<Duration, Failure> {
        let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten().and_then(|ticks| u32::try_from(ticks).ok());
        let stat = self.read("stat")?;
        cpu_ticks(&stat)
            .zip(ticks.filter(|&ticks| ticks > 0))
            .map(|(used, per_second)| Duration::from_secs(used) / per_second)
            .ok_or_else(|| Failure::new(format!("cannot read the times of process {}", self.id)))
    }

    /// Resident memory in bytes.
    pub(crate) fn rss(self) -> Result<u64, Failure> {
        let status = self.read("status")?;
        resident(&status)
            .ok_or_else(|| Failure::new(format!("cannot read the memory of process {}", self.id)))
    }

    fn read(self, file: &str) -> Result<String, Failure> {
        let path = format!("/proc/{}/{file}", self.id);
        fs::read_to_string(&path).map_err(|why| Failure::new(format!("cannot read `{path}`: {why}")))
    }
}

/// The load of the last minute: how many threads wanted a processor.
pub(crate) fn load_average() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

/// `utime` and `stime`, fields 14 and 15. The second field is a name that may hold spaces and parentheses.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(11);
    let (user, kernel): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + kernel)
}

fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194304 100 0 0 0 70 30 5 6 20 0 2 0 100 1000 200";
        assert_eq!(cpu_ticks(stat), Some(100));
        assert_eq!(cpu_ticks("42 (cut) S 1 2"), None);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        assert_eq!(resident("Name:\tx\nVmRSS:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!(resident("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_uses_memory() {
        let me = Process::new(std::process::id());
        assert!(me.rss().unwrap() > 0);
        me.cpu().unwrap();
    }
}
