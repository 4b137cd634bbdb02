//! What a warm request pays for its session: `cargo bench -p obol-session`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark")]

use std::time::Instant;

use futures::{StreamExt as _, stream};

use crate::support::{Fixture, Who};

#[path = "../tests/support/mod.rs"]
mod support;

const SESSIONS: usize = 1_000;
const RESUMES: usize = 200_000;
/// Requests under way at once; their commands share one connection.
const AT_ONCE: usize = 256;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let f = Fixture::redis().await;
        let owners: Vec<Who> = (0..SESSIONS).map(|n| Who::key("acme", &format!("k{n}"))).collect();
        let mut ids = Vec::new();
        for owner in &owners {
            ids.push(f.sessions.create(owner.new_session()).await.unwrap().session_id.expose());
        }
        let (begun, busy) = (Instant::now(), busy(&f).await);
        stream::iter(0..RESUMES)
            .for_each_concurrent(AT_ONCE, |n| {
                let (id, caller) =
                    (ids.get(n % SESSIONS).unwrap(), owners.get(n % SESSIONS).unwrap().caller());
                let sessions = &f.sessions;
                async move {
                    sessions.get_or_resume(id, &caller).await.unwrap();
                }
            })
            .await;
        let (wall, core) = (begun.elapsed().as_secs_f64(), self::busy(&f).await - busy);
        let resumes = u32::try_from(RESUMES).unwrap();
        let rate = |seconds: f64| f64::from(resumes) / seconds;
        println!("resume, {AT_ONCE} at once over one connection: {:.0} per second", rate(wall));
        println!("resume, per second of one core of Redis: {:.0}", rate(core));
    });
}

/// CPU seconds that Redis has used.
async fn busy(f: &Fixture) -> f64 {
    let info: String = f.server().unwrap().query(&["INFO", "cpu"]).await;
    let seconds = ["used_cpu_user:", "used_cpu_sys:"].map(|name| {
        info.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse::<f64>().unwrap()
    });
    seconds.iter().sum()
}
