//! Readiness of a replica whose Redis answers and takes no writes.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail loudly, as tests do")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use obol_testkit::process::{Proc, Stream};
use obol_testkit::redis::RedisServer;

const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const DEADLINE: Duration = Duration::from_secs(20);

fn get(admin: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(admin).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test]
async fn a_redis_that_takes_no_writes_makes_nobody_ready_until_it_does() {
    for (refuse, allow) in [
        (["CONFIG", "SET", "maxmemory", "1"], ["CONFIG", "SET", "maxmemory", "0"]),
        (["ACL", "SETUSER", "default", "-@scripting"], ["ACL", "SETUSER", "default", "+@all"]),
        (["ACL", "SETUSER", "default", "-@write"], ["ACL", "SETUSER", "default", "+@all"]),
    ] {
        let redis = RedisServer::start().await;
        redis.cli(&refuse).await;
        let replica = Proc::command(Path::new(env!("CARGO_BIN_EXE_obol")))
            .arg("run")
            .env("OBOL_REDIS_URL", redis.url())
            .env("OBOL_CREDENTIAL_KEY", KEY)
            .env("OBOL_LISTEN", "127.0.0.1:0")
            .env("OBOL_ADMIN_LISTEN", "127.0.0.1:0")
            .spawn();
        let line = replica.wait_for_line(DEADLINE, |line| line.starts_with("listening admin")).await;
        let admin = line.trim_start_matches("listening admin http://").to_owned();
        for _ in 0..3 {
            let answer = get(&admin, "/readyz");
            assert!(answer.starts_with("HTTP/1.1 503") && answer.contains(r#""reason":"redis""#), "{answer}");
        }
        assert!(get(&admin, "/healthz").starts_with("HTTP/1.1 200"));
        redis.cli(&allow).await;
        // There is no publication, which is what is left.
        let answer = get(&admin, "/readyz");
        assert!(answer.contains(r#""reason":"no_snapshot""#), "at once: {answer}");
        let log = replica.lines_of(Stream::Err);
        let told: Vec<&String> = log.iter().filter(|line| line.contains("it has no lease")).collect();
        assert!(told.len() == 1 && told[0].contains("ERROR") && told[0].contains("answered `"), "{log:?}");
    }
}
