//! Budgets of a key, a model and a workspace at once: whichever has the least room binds, exactly (C067).

use std::collections::BTreeMap;

use futures::stream::{FuturesUnordered, StreamExt as _};
use obol_testkit::eventually;
use obol_testkit::fake_llm::Reply as Says;
use obol_tests::SOON;
use obol_tests::client::{Reply, http};
use obol_tests::world::{World, workspace};
use serde_json::Value;

use super::{counters, new_key, rounds, total, usd};

const CALLERS: usize = 60;
/// How many calls of the worst case fit into the budget of a key, of a model and of the workspace.
const FIT: [i64; 3] = [5, 8, 11];

fn body(model: &str) -> String {
    format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"one two three"}}]}}"#)
}

/// Another model, of which no budget speaks; top-level budgets.
fn extra(limits: Option<[i64; 3]>) -> String {
    let Some([_, model, all]) = limits else { return "expose_revision: true\n".to_owned() };
    format!(
        "expose_revision: true\nbudgets:\n  - {{ scope: model, model: small, window: total, limit_usd: {} }}\n  \
         - {{ scope: workspace, window: total, limit_usd: {} }}\n",
        usd(model),
        usd(all)
    )
}

fn file(world: &World, limits: Option<[i64; 3]>) -> String {
    let text = workspace("acme", &world.mcp, &world.llm, &extra(limits));
    let (small, rest) = text.split_once("models:\n").unwrap();
    let other = "  large:\n    max_output: 1000\n    targets: [ { provider: fake, model: fake-large, price: { input: 1, output: 2 } } ]\n";
    format!("{small}models:\n{other}{rest}")
}

async fn chat(world: &World, replica: usize, key: &str, model: &str) -> Reply {
    let request = http().post(format!("{}/v1/chat/completions", world.cluster.public_url(replica)));
    Reply::of(request.bearer_auth(key).header("content-type", "application/json").body(body(model))).await
}

async fn models(world: &World, replica: usize, key: &str) -> Reply {
    let url = format!("{}/v1/models", world.cluster.public_url(replica));
    Reply::of(http().get(url).bearer_auth(key)).await
}

async fn spent(world: &World, counter: &str) -> (i64, i64) {
    counters(&world.cluster).await.get(counter).copied().unwrap_or_default()
}

/// `OBOL_TEST_ROUNDS=50` for a long run.
#[tokio::test]
async fn whichever_budget_has_the_least_room_binds_exactly() {
    let world = World::with(4, &extra(None), |builder| builder).await;
    let small = world.chat(body("small")).await;
    assert_eq!(small.status, 200);
    let events =
        eventually(SOON, || async { Some(world.usage().await).filter(|events| !events.is_empty()) }).await;
    let worst = events[0]["reserved"].as_i64().unwrap();
    for round in 0..rounds(3) {
        // Above what was spent so far, so that each round has the same room: not quite one call more than fits.
        let room = |spent: i64, fit: i64| spent + fit * worst + worst / 2;
        let (model, all) =
            (spent(&world, "model:small:total").await.0, spent(&world, "workspace:total").await.0);
        let limits = [room(0, FIT[0]), room(model, FIT[1]), room(all, FIT[2])];
        let before = models(&world, 0, &world.key).await.header("x-obol-revision").to_owned();
        world.cluster.write_workspace("acme", &file(&world, Some(limits)));
        let mut keys = Vec::new();
        let own = new_key(&world.cluster, &["--budget", &format!("total={}", usd(limits[0]))]).await;
        for _ in 0..3 {
            keys.push(new_key(&world.cluster, &[]).await);
        }
        for replica in 0..4 {
            for key in keys.iter().chain([&own]) {
                eventually(SOON, || async {
                    let reply = models(&world, replica, key).await;
                    reply.status == 200 && reply.header("x-obol-revision") != before
                })
                .await;
            }
        }
        let one = [own];
        // The key binds on the model that has a budget, the model for keys without one, and the workspace elsewhere.
        for (callers, model, fit, budget) in [
            (&one[..], "small", FIT[0], "key total"),
            (&keys[..], "small", FIT[1], "model small total"),
            (&keys[..], "large", FIT[2], "workspace total"),
        ] {
            let what = format!("round {round}: {budget}");
            let fit = usize::try_from(fit).unwrap();
            world.llm.reply(Says::Stall);
            let before = world.llm.calls();
            let call = |n: usize| chat(&world, n % 4, &callers[n % callers.len()], model);
            let mut calls: FuturesUnordered<_> = (0..CALLERS).map(call).collect();
            let mut names: BTreeMap<String, usize> = BTreeMap::new();
            for _ in 0..CALLERS - fit {
                let reply = calls.next().await.unwrap();
                let error = reply.json()["error"].clone();
                assert_eq!(
                    (reply.status, &error["code"]),
                    (429, &Value::from("budget_exceeded")),
                    "{what}: {reply:?}"
                );
                let message = error["message"].as_str().unwrap();
                *names.entry(message.split('`').nth(1).unwrap().to_owned()).or_default() += 1;
            }
            world.llm.wait_for_calls(before + fit as u64).await;
            let binding: Vec<&str> = names.keys().map(String::as_str).collect();
            assert_eq!(binding, [budget], "{what}: alone");
            for (counter, limit) in [("model:small:total", limits[1]), ("workspace:total", limits[2])] {
                let (settled, reserved) = spent(&world, counter).await;
                assert!(
                    settled + reserved <= limit,
                    "{what}: {counter} has {settled} + {reserved} of {limit}"
                );
            }
            world.llm.release();
            let admitted: Vec<Reply> = calls.collect().await;
            assert!(
                admitted.len() == fit && admitted.iter().all(|reply| reply.status == 200),
                "{what}: {admitted:?}"
            );
            assert_eq!(world.llm.calls(), before + fit as u64, "{what}: nobody else was served");
            eventually(SOON, || async {
                counters(&world.cluster).await.values().all(|(_, reserved)| *reserved == 0)
            })
            .await;
        }
    }
    let events = world.usage().await;
    let calls = usize::try_from(FIT.iter().sum::<i64>()).unwrap();
    assert_eq!(events.len(), 1 + rounds(3) * calls);
    let uncounted = events[0]["cost"].as_i64().unwrap();
    assert_eq!(spent(&world, "workspace:total").await.0, total(&events) - uncounted);
}
