//! The processes of an installation, one by one.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use tokio::time::Instant;

use crate::Failure;
use crate::answer::origin;
use crate::process::{Proc, Spec};

use super::Replica;

/// How long a process of the installation may take to say that it is ready: generous, since a debug build on a busy
/// machine of two cores has to make it too.
pub(super) const READY: Duration = Duration::from_secs(30);

/// What all processes of one installation have in common.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) obol: PathBuf,
    pub(super) redis_url: String,
    pub(super) gateway_redis_url: String,
    pub(super) env: BTreeMap<String, String>,
    pub(super) gateway_env: BTreeMap<String, String>,
    pub(super) control_env: BTreeMap<String, String>,
    pub(super) path_first: Vec<PathBuf>,
}

impl Settings {
    pub(super) fn command(&self, name: &str, redis_url: &str) -> Spec {
        let spec = Proc::command(&self.obol).named(name).env("OBOL_REDIS_URL", redis_url).envs(&self.env);
        self.path_first.iter().fold(spec, Spec::path_first)
    }
}

pub(super) fn secrets() -> BTreeMap<String, String> {
    let mut random = [0; 64];
    getrandom::fill(&mut random).expect("random bytes");
    let (key, secret) = random.split_at(32);
    let encode = |bytes: &[u8]| base64::engine::general_purpose::STANDARD.encode(bytes);
    BTreeMap::from([
        ("OBOL_CREDENTIAL_KEY".to_owned(), format!("test:{}", encode(key))),
        ("OBOL_SERVICE_JWT_SECRET".to_owned(), encode(secret)),
    ])
}

pub(super) async fn start_control(settings: &Settings, dir: &Path, run: usize) -> Result<Proc, Failure> {
    let control = settings
        .command("obol control", &settings.redis_url)
        .envs(&settings.control_env)
        .arg("control")
        .arg("--workspaces")
        .arg(dir.join("workspaces"))
        .arg("--state")
        .arg(dir.join("state"))
        .log_to(dir.join(format!("logs/{run:03}-control.log")))
        .try_spawn()?;
    control.try_wait_for_line(READY, |line| line.trim() == "control ready").await?;
    Ok(control)
}

pub(super) async fn start_replica(
    settings: &Settings,
    dir: &Path,
    index: usize,
    run: usize,
) -> Result<Replica, Failure> {
    let process = settings
        .command(&format!("obol run (replica {index})"), &settings.gateway_redis_url)
        .env("OBOL_LISTEN", "127.0.0.1:0")
        .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
        .env("OBOL_PEER_LISTEN", "127.0.0.1:0")
        .envs(&settings.env)
        .envs(&settings.gateway_env)
        .arg("run")
        .log_to(dir.join(format!("logs/{run:03}-replica-{index}.log")))
        .try_spawn()?;
    let public = listener(&process, "listening public http://").await?;
    let admin = listener(&process, "listening admin http://").await?;
    // Printed before the public one.
    let peer = process
        .lines()
        .iter()
        .find_map(|line| line.strip_prefix("listening peer http://")?.trim().parse().ok());
    Ok(Replica { public, admin, peer, process })
}

async fn listener(process: &Proc, prefix: &str) -> Result<SocketAddr, Failure> {
    let line = process.try_wait_for_line(READY, |line| line.starts_with(prefix)).await?;
    let addr = line.trim_start_matches(prefix).trim();
    addr.parse().map_err(|_| Failure::new(format!("`{line}` names no address")))
}

pub(super) async fn ready(index: usize, replica: &Replica) -> Result<(), Failure> {
    let url = format!("{}/readyz", origin(replica.admin));
    let http = reqwest::Client::builder().timeout(Duration::from_secs(2)).build().expect("an HTTP client");
    let end = Instant::now() + READY;
    loop {
        let last = match http.get(&url).send().await {
            Ok(response) if response.status() == 200 => return Ok(()),
            Ok(response) => format!("{} {}", response.status(), response.text().await.unwrap_or_default()),
            Err(why) => why.to_string(),
        };
        if Instant::now() > end || replica.process.exit_status().is_some() {
            let wrote = replica.process.lines().join("\n");
            return Err(Failure::new(format!("replica {index} is not ready: {last}; it wrote:\n{wrote}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes beside and renames, so that a watcher never reads half a file.
pub(super) fn write_whole(file: &Path, text: &str) -> Result<(), Failure> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let beside = file.with_file_name(format!(".{name}.new"));
    fs::write(&beside, text)
        .and_then(|()| fs::rename(&beside, file))
        .map_err(|why| Failure::new(format!("cannot write `{}`: {why}", file.display())))
}
