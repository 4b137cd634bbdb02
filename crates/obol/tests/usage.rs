//! Usage from the stream of Redis to the sums of `obol usage`, and the audit of the ledger.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use obol_testkit::eventually;
use obol_testkit::process::Proc;
use obol_testkit::redis::RedisServer;
use serde_json::{Value, json};

const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const DEADLINE: Duration = Duration::from_secs(20);

struct Bench {
    dir: tempfile::TempDir,
    redis: RedisServer,
}

struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Bench {
    async fn new() -> Self {
        let bench = Self { dir: tempfile::tempdir().unwrap(), redis: RedisServer::start().await };
        fs::create_dir(bench.path("ws")).unwrap();
        fs::write(bench.path("ws/acme.yaml"), "workspace: acme\nenvironment: test\n").unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn control(&self) -> Proc {
        let control = Proc::command(Path::new(env!("CARGO_BIN_EXE_obol")))
            .arg("control")
            .env("OBOL_REDIS_URL", self.redis.url())
            .env("OBOL_CREDENTIAL_KEY", KEY)
            .env("OBOL_STATE_DIR", self.path("state"))
            .env("OBOL_WORKSPACES_DIR", self.path("ws"))
            .spawn();
        control.wait_for_line(DEADLINE, |line| line == "control ready").await;
        control
    }

    fn usage(&self, args: &[&str]) -> Said {
        let output: Output = Command::new(env!("CARGO_BIN_EXE_obol"))
            .arg("usage")
            .args(args)
            .env_clear()
            .env("OBOL_REDIS_URL", self.redis.url())
            .env("OBOL_STATE_DIR", self.path("state"))
            .output()
            .expect("the binary runs");
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    async fn add(&self, number: u32, day: u32, tool: &str, cost: i64) {
        let event = json!({
            "schema_version": 2, "event_id": format!("019b7e2f-4f0a-7000-8000-{number:012}"), "workspace_id": "acme",
            "key_id": "k1", "replica": "r-0123456789ab", "revision": {"epoch": 1, "number": 1}, "kind": "tool_call",
            "connection": "git", "tool": tool, "outcome": "ok", "started_at": format!("2026-12-{day:02}T23:59:59Z"),
            "duration_ms": 1, "tokens": {"input": 0, "output": 0}, "reserved": 0, "cost": cost,
        });
        let _: String = self.redis.query(&["XADD", "usage:{acme}", "*", "event", &event.to_string()]).await;
    }

    async fn left(&self) -> u64 {
        self.redis.query(&["XLEN", "usage:{acme}"]).await
    }
}

#[tokio::test]
async fn usage_is_collected_and_summed_whatever_becomes_of_control() {
    let bench = Bench::new().await;
    let early = bench.usage(&[]);
    assert_eq!(early.code, Some(1));
    assert!(early.err.contains("is no state directory"), "{}", early.err);

    let control = bench.control().await;
    bench.add(1, 1, "search", 1_500_000_000).await;
    bench.add(2, 1, "a,b", 1).await;
    eventually(DEADLINE, async || bench.left().await == 0).await;
    control.kill9().await;
    bench.add(3, 2, "search", -2).await;
    bench.add(4, 3, "search", 4).await;
    let control = bench.control().await;
    eventually(DEADLINE, async || bench.left().await == 0).await;

    let text = bench.usage(&["--by", "day", "--to", "2026-12-02"]);
    assert_eq!(text.code, Some(0), "{}", text.err);
    let rows: Vec<Vec<&str>> = text.out.lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!((rows[0][0], rows[0][1], *rows[0].last().unwrap()), ("DAY", "REQUESTS", "USD"));
    assert_eq!((rows[1][0], rows[1][1], *rows[1].last().unwrap()), ("2026-12-01", "2", "1.500000001"));
    assert_eq!((rows[2][0], rows[2][1], *rows[2].last().unwrap()), ("2026-12-02", "1", "-0.000000002"));
    assert_eq!(rows.len(), 3);

    let csv = bench.usage(&["--workspace", "acme", "--by", "connection,tool", "--format", "csv"]).out;
    assert_eq!(
        csv.lines().collect::<Vec<_>>(),
        [
            "connection,tool,requests,errors,input,cached_input,cache_write,audio_input,output,reasoning,audio_output,usd",
            "git,\"a,b\",1,0,0,0,0,0,0,0,0,0.000000001",
            "git,search,3,0,0,0,0,0,0,0,0,1.500000002",
        ]
    );
    let shown: Value =
        serde_json::from_str(&bench.usage(&["--by", "month", "--format", "json"]).out).unwrap();
    assert_eq!(shown["totals"][0]["month"], "2026-12");
    assert_eq!(shown["totals"][0]["cost_nanos"], 1_500_000_003);
    assert_eq!(shown["totals"][0]["cost_usd"], "1.500000003");
    assert_eq!(shown["totals"][0]["tokens"]["input"], 0);

    for (bad, why) in [
        (&["--by", "colour"][..], "expected one of workspace, key"),
        (&["--from", "yesterday"], "expected a day"),
        (&["--from", "2026-12-02", "--to", "2026-12-01"], "is after"),
    ] {
        let said = bench.usage(bad);
        assert!(said.code == Some(2) && said.err.contains(why), "{}", said.err);
    }
    control.terminate();
    assert!(control.wait(DEADLINE).await.success());
}

#[tokio::test]
async fn an_audit_says_which_counters_do_not_agree_with_the_open_reservations() {
    let bench = Bench::new().await;
    let nothing = bench.usage(&["audit", "acme"]);
    assert_eq!((nothing.code, nothing.out.as_str()), (Some(0), ""));
    assert!(nothing.err.contains("no counters"), "{}", nothing.err);

    let redis = &bench.redis;
    let counter = "ledger:{acme}:c:workspace:day:2026-12-01";
    let _: i64 = redis.query(&["HSET", counter, "settled", "2000000000", "reserved", "7"]).await;
    let id = "019b7e2f-4f0a-7000-8000-000000000001";
    let _: i64 = redis.query(&["ZADD", "ledger:{acme}:open", "1", &format!("r-0123456789ab {id}")]).await;
    let reservation = format!("ledger:{{acme}}:r:{id}");
    let counters = json!([counter]).to_string();
    let _: i64 = redis.query(&["HSET", &reservation, "amount", "7", "counters", &counters]).await;
    let said = bench.usage(&["audit", "acme"]);
    assert_eq!(said.code, Some(0), "{}", said.err);
    let row: Vec<&str> = said.out.lines().nth(1).unwrap().split_whitespace().collect();
    let expected = "workspace:day:2026-12-01 2.000000000 0.000000007 2.000000007 0.000000007 yes";
    assert_eq!(row.join(" "), expected);

    let _: i64 = redis.query(&["HINCRBY", counter, "reserved", "1"]).await;
    let said = bench.usage(&["audit", "acme", "--json"]);
    assert_eq!(said.code, Some(1));
    assert!(said.err.contains("not what the open reservations say"), "{}", said.err);
    let shown: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((&shown["agree"], &shown["counters"][0]["agree"]), (&json!(false), &json!(false)));
    assert_eq!(shown["counters"][0]["enforced_nanos"], 2_000_000_008_u64);
    assert_eq!(shown["counters"][0]["open_nanos"], 7);
}
