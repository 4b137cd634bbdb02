//! Real balancers with the configuration that is shipped: only ports and places are others.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use obol_testkit::eventually;
use obol_testkit::port::Port;
use obol_testkit::process::{Proc, Spec};
use tempfile::TempDir;

use crate::{SOON, root};

/// Where a replica listens: for clients, for operators.
pub type Replica = (SocketAddr, SocketAddr);

/// A balancer that runs; dropping it ends it.
#[derive(Debug)]
pub struct Front {
    /// The process.
    pub process: Proc,
    port: Port,
    _dir: TempDir,
}

impl Front {
    /// HAProxy with `deploy/haproxy.cfg`.
    pub async fn haproxy(replicas: [Replica; 2]) -> Self {
        let (dir, port) = (place(), Port::reserve());
        let config = haproxy_config(dir.path(), port.addr(), replicas);
        let process = Proc::command(server("haproxy")).arg("-db").arg("-f").arg(config).spawn();
        Self::up(process, port, dir).await
    }

    /// nginx with `deploy/nginx.conf`.
    pub async fn nginx(replicas: [Replica; 2]) -> Self {
        let (dir, port) = (place(), Port::reserve());
        let config = nginx_config(dir.path(), port.addr(), replicas);
        let process = nginx(dir.path(), &config, "daemon off;").spawn();
        Self::up(process, port, dir).await
    }

    async fn up(process: Proc, port: Port, dir: TempDir) -> Self {
        let front = Self { process, port, _dir: dir };
        let url = format!("{}/readyz", front.url());
        eventually(SOON, || async { reqwest::get(&url).await.ok().filter(|answer| answer.status() == 200) })
            .await;
        front
    }

    /// `http://127.0.0.1:PORT`
    pub fn url(&self) -> String {
        format!("http://{}", self.port.addr())
    }
}

/// How nginx is called so that it writes nothing but below `dir`.
pub fn nginx(dir: &Path, config: &Path, directives: &str) -> Spec {
    let directives = format!("{directives} pid {};", dir.join("nginx.pid").display());
    Proc::command(server("nginx"))
        .args(["-e", "stderr", "-g", &directives, "-c"])
        .arg(config)
        .arg("-p")
        .arg(dir)
}

/// Writes `deploy/haproxy.cfg` for these addresses into `dir`.
pub fn haproxy_config(dir: &Path, front: SocketAddr, replicas: [Replica; 2]) -> PathBuf {
    let config = shipped("haproxy.cfg");
    let config = replaced(&config, "bind :8080\n", &format!("bind {front}\n"));
    let config = replicas.iter().enumerate().fold(config, |config, (index, (public, admin))| {
        let name = format!("gateway-{}", index + 1);
        let with = format!("server {name} {public} check port {}\n", admin.port());
        replaced(&config, &format!("server {name} {name}:8080 check port 8081\n"), &with)
    });
    written(dir, "haproxy.cfg", &config)
}

/// Writes `deploy/nginx.conf` for these addresses into `dir`.
pub fn nginx_config(dir: &Path, front: SocketAddr, replicas: [Replica; 2]) -> PathBuf {
    let config = replaced(&shipped("nginx.conf"), "listen 8080;\n", &format!("listen {front};\n"));
    let config = replicas.iter().enumerate().fold(config, |config, (index, (public, _))| {
        replaced(&config, &format!("server 192.0.2.1{}:8080 ", index + 1), &format!("server {public} "))
    });
    // Its own places are those of a package, which only root may write to.
    let places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|what| format!("{what}_temp_path {};\n", dir.join(what).display()));
    written(dir, "nginx.conf", &replaced(&config, "http {\n", &format!("http {{\n{}", places.concat())))
}

/// A directory that the workers of a server reach too.
pub fn place() -> TempDir {
    tempfile::Builder::new().prefix("obol-front-").tempdir().expect("a directory")
}

/// Debian keeps servers in a directory that is on root's `PATH` alone.
///
/// # Panics
/// When it is not installed. Such a test must not pass by not running.
pub fn server(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    let found = dirs.map(|dir| dir.join(name)).find(|file| file.is_file());
    found.unwrap_or_else(|| panic!("{name} is not installed: `scripts/setup.sh core` does it"))
}

fn shipped(name: &str) -> String {
    fs::read_to_string(root().join("deploy").join(name)).expect("a file that is shipped")
}

fn replaced(config: &str, what: &str, with: &str) -> String {
    assert_eq!(config.matches(what).count(), 1, "`{what}` in:\n{config}");
    config.replace(what, with)
}

fn written(dir: &Path, name: &str, config: &str) -> PathBuf {
    let file = dir.join(name);
    fs::write(&file, config).expect("the configuration is written");
    file
}
