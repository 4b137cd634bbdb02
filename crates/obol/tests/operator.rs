//! What operators' commands do when Redis is away, when it is another store's, and when it knows more than theirs.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "helpers of tests may fail loudly, as tests do"
)]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use obol_testkit::redis::RedisServer;

const KEY: &str = "k1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

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
        bench.write("acme", "one");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, workspace: &str, environment: &str) {
        let text = format!("workspace: {workspace}\nenvironment: {environment}\n");
        fs::write(self.path("ws").join(format!("{workspace}.yaml")), text).unwrap();
    }

    /// A command on the store in this directory.
    fn on(&self, state: &str, args: &[&str]) -> Said {
        let output: Output = Command::new(env!("CARGO_BIN_EXE_obol"))
            .args(args)
            .env_clear()
            .env("OBOL_REDIS_URL", self.redis.url())
            .env("OBOL_CREDENTIAL_KEY", KEY)
            .env("OBOL_STATE_DIR", self.path(state))
            .env("OBOL_WORKSPACES_DIR", self.path("ws"))
            .output()
            .expect("the binary runs");
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Said { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    fn obol(&self, args: &[&str]) -> Said {
        self.on("state", args)
    }

    fn publish(&self, more: &[&str]) -> Said {
        let file = self.path("ws/acme.yaml");
        self.obol(&[&["publish", file.to_str().unwrap()], more].concat())
    }

    fn key_state(&self, id: &str) -> String {
        let listed = self.obol(&["key", "list"]).out;
        let row = listed.lines().find(|row| row.starts_with(id)).unwrap().to_owned();
        row.split_whitespace().nth(2).unwrap().to_owned()
    }
}

#[tokio::test]
async fn what_is_decided_while_redis_is_away_is_recorded_and_said_to_be() {
    let bench = Bench::new().await;
    assert_eq!(bench.publish(&[]).out, "published acme 1.1\n");
    bench.obol(&["key", "new", "--workspace", "acme"]);
    let id = bench.obol(&["key", "list"]).out.lines().nth(1).unwrap().split(' ').next().unwrap().to_owned();
    bench.redis.kill();

    let recorded =
        "error: it is recorded, and the replicas do not know yet: Redis could not be asked: cannot connect";
    for (command, state) in [("disable", "disabled"), ("enable", "active"), ("revoke", "revoked")] {
        let said = bench.obol(&["key", command, &id]);
        assert_eq!(said.code, Some(1), "{}", said.err);
        assert!(said.out.ends_with(&format!("d {id}\n")), "{}", said.out);
        assert!(said.err.contains(recorded) && said.err.contains("or run the command again"), "{}", said.err);
        assert_eq!(bench.key_state(&id), state);
    }
    let said = bench.obol(&["key", "new", "--workspace", "acme"]);
    assert!(said.code == Some(1) && said.out.starts_with("obol_"), "{}", said.err);
    assert!(
        said.err.contains(recorded) && said.err.contains("`obol control` that runs with"),
        "{}",
        said.err
    );
    assert!(said.err.contains("do not run the command again"), "it would make another: {}", said.err);

    bench.write("acme", "two");
    for refused in [bench.publish(&[]), bench.obol(&["workspace", "rollback", "acme", "--to", "1.1"])] {
        assert_eq!((refused.code, refused.out.as_str()), (Some(1), ""));
        assert!(refused.err.contains("nothing was recorded"), "{}", refused.err);
        assert!(refused.err.contains("cannot connect to Redis"), "{}", refused.err);
    }
    let said = bench.obol(&["workspace", "unpublish", "acme"]);
    assert_eq!((said.code, said.out.as_str()), (Some(1), "unpublished acme\n"));
    assert!(said.err.contains(recorded), "{}", said.err);

    // Control does what was said.
    bench.redis.restart().await;
    fs::remove_file(bench.path("ws/acme.yaml")).unwrap();
    let control = bench.obol(&["control", "--once"]);
    assert_eq!(control.code, Some(0), "{}", control.err);
    assert_eq!(bench.redis.keys("key:*").await.len(), 1);
    assert!(bench.redis.keys("policy:*").await.is_empty());
}

#[tokio::test]
async fn a_mistyped_state_directory_takes_over_no_redis() {
    let bench = Bench::new().await;
    assert_eq!(bench.obol(&["control", "--once"]).code, Some(0));
    let before = bench.redis.keys("*").await;
    let other = Bench::new().await;
    for args in [
        ["key", "new", "--workspace", "acme"].as_slice(),
        &["publish", other.path("ws/acme.yaml").to_str().unwrap()],
    ] {
        let refused = bench.on("sttae", args);
        assert_eq!((refused.code, refused.out.as_str()), (Some(1), ""), "{}", refused.err);
        assert!(
            refused.err.contains("nothing was changed: Redis has what a control's store says"),
            "{}",
            refused.err
        );
        assert!(!bench.path("sttae").exists());
    }
    // One that is another installation's.
    let made = Command::new(env!("CARGO_BIN_EXE_obol"))
        .args(["key", "new", "--workspace", "acme", "--state"])
        .arg(bench.path("other"))
        .env_clear()
        .output()
        .unwrap();
    assert_eq!(made.status.code(), Some(0));
    let refused = bench.on("other", &["key", "new", "--workspace", "acme"]);
    assert_eq!((refused.code, refused.out.as_str()), (Some(1), ""));
    assert!(refused.err.contains("wrong state directory or database"), "{}", refused.err);
    assert!(refused.err.contains("delete `keys:loaded` in Redis"), "{}", refused.err);
    assert_eq!(bench.on("other", &["key", "list"]).out.lines().count(), 2, "the title and the one");
    assert_eq!(bench.redis.keys("*").await, before);
    assert_eq!(bench.obol(&["key", "new", "--workspace", "acme"]).code, Some(0), "the right one");
}

#[tokio::test]
async fn a_store_that_lags_behind_redis_is_told_of_raise_epoch() {
    let bench = Bench::new().await;
    bench.publish(&[]);
    let copied =
        Command::new("cp").arg("-r").args([bench.path("state"), bench.path("backup")]).status().unwrap();
    assert!(copied.success());
    bench.write("acme", "two");
    assert_eq!(bench.publish(&[]).out, "published acme 1.2\n");
    fs::remove_dir_all(bench.path("state")).unwrap();
    fs::rename(bench.path("backup"), bench.path("state")).unwrap();
    bench.write("acme", "one");
    let said = bench.publish(&[]);
    assert_eq!((said.code, said.out.as_str()), (Some(1), "unchanged acme 1.1\n"));
    assert!(
        said.err.contains("the replicas have revision 1.2 of `acme`, which is not older"),
        "{}",
        said.err
    );
    assert!(said.err.contains("`obol publish --raise-epoch FILE`"), "{}", said.err);
    let said = bench.publish(&["--raise-epoch"]);
    assert_eq!((said.code, said.out.as_str()), (Some(0), "published acme 2.1\n"), "{}", said.err);
}

#[tokio::test]
async fn a_workspace_whose_file_is_gone_is_not_said_to_come_from_a_command() {
    let bench = Bench::new().await;
    bench.write("beta", "one");
    bench.obol(&["control", "--once"]);
    fs::remove_file(bench.path("ws/acme.yaml")).unwrap();
    assert_eq!(bench.obol(&["control", "--once"]).code, Some(0));
    bench.obol(&["workspace", "unpublish", "beta"]);
    let listed = bench.obol(&["workspace", "list"]).out;
    let rows: Vec<&str> = listed.lines().collect();
    assert!(
        rows[1].starts_with("acme ") && rows[1].ends_with("unpublished  a file that is gone"),
        "{listed}"
    );
    assert!(rows[2].starts_with("beta ") && rows[2].ends_with("unpublished  a command"), "{listed}");
    assert!(bench.obol(&["workspace", "show", "acme"]).out.contains("file: a file that is gone\n"));
}
