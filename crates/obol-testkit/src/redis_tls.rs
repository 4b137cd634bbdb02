//! A real Redis behind TLS, with an authority of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::port::Port;
use crate::redis::RedisServer;

/// A server that speaks TLS on one port and, for the kit's own questions, plain text on another.
#[derive(Debug)]
pub struct RedisTls {
    server: RedisServer,
    tls: Port,
    dir: TempDir,
}

impl RedisTls {
    /// Makes an authority and a certificate for `localhost` and `127.0.0.1`, and starts a server with it.
    ///
    /// # Panics
    /// When `openssl` or `redis-server` is missing or fails.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Starts one with further arguments.
    ///
    /// # Panics
    /// As [`RedisTls::start`].
    pub async fn start_with(args: &[&str]) -> Self {
        let dir = tempfile::Builder::new().prefix("obol-tls-").tempdir().expect("a directory");
        make_certificates(dir.path());
        let tls = Port::reserve();
        let (port, file) =
            (tls.addr().port().to_string(), |name: &str| dir.path().join(name).display().to_string());
        let (cert, key, ca) = (file("server.crt"), file("server.key"), file("ca.crt"));
        let own = [
            ["--tls-port", &port],
            ["--tls-cert-file", &cert],
            ["--tls-key-file", &key],
            ["--tls-ca-cert-file", &ca],
            ["--tls-auth-clients", "no"],
        ];
        let server = RedisServer::start_with(&[own.as_flattened(), args].concat()).await;
        Self { server, tls, dir }
    }

    /// `rediss://localhost:PORT`
    pub fn url(&self) -> String {
        format!("rediss://localhost:{}", self.tls.addr().port())
    }

    /// Where it speaks TLS.
    pub fn port(&self) -> u16 {
        self.tls.addr().port()
    }

    /// The server, as it is reached without TLS.
    pub fn server(&self) -> &RedisServer {
        &self.server
    }

    /// The certificate of the authority, a PEM file.
    pub fn ca_file(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }
}

fn make_certificates(dir: &Path) {
    let names = "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=critical,CA:false\n";
    std::fs::write(dir.join("names"), names).expect("a file");
    let new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    for step in [
        format!(
            "req -x509 {new_key} -keyout ca.key -out ca.crt -subj /CN=authority -days 30 \
             -addext basicConstraints=critical,CA:true"
        ),
        format!("req {new_key} -keyout server.key -out server.csr -subj /CN=localhost"),
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 30 -extfile names"
            .to_owned(),
    ] {
        let done = Command::new("openssl")
            .args(step.split_whitespace())
            .current_dir(dir)
            .output()
            .expect("`openssl` is on PATH; `scripts/setup.sh core` installs it");
        assert!(done.status.success(), "openssl {step}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_answers_on_both_ports() {
        let redis = RedisTls::start().await;
        redis.server().cli(&["SET", "a", "1"]).await;
        let client = ::redis::Client::build_with_tls(
            redis.url(),
            ::redis::TlsCertificates {
                client_tls: None,
                root_cert: Some(std::fs::read(redis.ca_file()).unwrap()),
            },
        );
        let mut connection = client.unwrap().get_multiplexed_async_connection().await.unwrap();
        let one: u32 = ::redis::cmd("GET").arg("a").query_async(&mut connection).await.unwrap();
        assert_eq!(one, 1);
    }
}
