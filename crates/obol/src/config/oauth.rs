//! OAuth (DESIGN §8.3): several variables that mean something together only.

use obol_auth::oauth::{
    Algorithms, ClaimRules, Issuer, JwksOptions, OAuthOptions, ProtectedResource, WorkspaceRule,
};
use obol_model::WorkspaceId;

use crate::config::read::Reader;
use crate::config::table::{self, Variable};
use crate::config::value::items;

/// Means nothing without an issuer.
const NEED_ISSUERS: [&Variable; 4] =
    [&table::OAUTH_SCOPES, &table::OAUTH_WORKSPACE, &table::OAUTH_WORKSPACE_CLAIM, &table::OAUTH_TAGS_CLAIM];

/// What access tokens are judged by; `None` without an issuer, and when something is wrong with it.
pub(super) fn oauth(reader: &mut Reader<'_>) -> Option<OAuthOptions> {
    let public_url = reader.optional(&table::PUBLIC_URL, public_url);
    let issuers = reader.optional(&table::OAUTH_ISSUERS, issuers);
    let algorithms = reader.value(&table::OAUTH_ALGORITHMS, algorithms);
    let scopes = reader.optional(&table::OAUTH_SCOPES, scopes);
    let workspace = reader.optional(&table::OAUTH_WORKSPACE, workspace);
    let workspace_claim = reader.optional(&table::OAUTH_WORKSPACE_CLAIM, claim);
    let tags = reader.optional(&table::OAUTH_TAGS_CLAIM, claim);
    let ttl = reader.seconds(&table::OAUTH_JWKS_TTL_S);
    if !reader.is_set(&table::OAUTH_ISSUERS) {
        for variable in NEED_ISSUERS.into_iter().filter(|v| reader.is_set(v)).collect::<Vec<_>>() {
            let issuers = table::OAUTH_ISSUERS.name;
            reader.conflict(variable, format!("set without {issuers}: there are no access tokens then"));
        }
        return None;
    }
    if !reader.is_set(&table::PUBLIC_URL) {
        let issuers = table::OAUTH_ISSUERS.name;
        reader.conflict(
            &table::PUBLIC_URL,
            format!("not set, and {issuers} is: tokens must be issued for this URL"),
        );
    }
    let (fixed, claimed) = (table::OAUTH_WORKSPACE.name, table::OAUTH_WORKSPACE_CLAIM.name);
    match (reader.is_set(&table::OAUTH_WORKSPACE), reader.is_set(&table::OAUTH_WORKSPACE_CLAIM)) {
        (true, true) => {
            reader.conflict(
                &table::OAUTH_WORKSPACE_CLAIM,
                format!("set together with {fixed}: keep one of them"),
            );
        }
        (false, false) => {
            reader.conflict(
                &table::OAUTH_WORKSPACE,
                format!("neither it nor {claimed} is set: users must belong to a workspace"),
            );
        }
        _ => {}
    }
    let issuers = issuers?;
    let ids = issuers.iter().map(|issuer| issuer.id().to_owned()).collect();
    let workspace = workspace.map(WorkspaceRule::Fixed).or(workspace_claim.map(WorkspaceRule::Claim));
    Some(OAuthOptions {
        resource: ProtectedResource::new(&public_url?, ids, scopes.unwrap_or_default()).ok()?,
        issuers,
        algorithms: algorithms?,
        claims: ClaimRules { workspace: workspace?, tags },
        jwks: JwksOptions { ttl: ttl?, ..JwksOptions::default() },
    })
}

fn public_url(text: &str) -> Result<String, String> {
    ProtectedResource::new(text, Vec::new(), Vec::new()).map_err(|e| e.to_string())?;
    Ok(text.to_owned())
}

fn issuers(text: &str) -> Result<Vec<Issuer>, String> {
    let bad = |position: usize, what: &str| format!("has an entry that {what} (number {})", position + 1);
    let mut all: Vec<Issuer> = Vec::new();
    for (position, item) in items(text).enumerate() {
        let issuer: Issuer = item.parse().map_err(|what| bad(position, what))?;
        if all.iter().any(|known| known.id() == issuer.id()) {
            return Err(bad(position, "names an issuer again"));
        }
        all.push(issuer);
    }
    Ok(all)
}

fn algorithms(text: &str) -> Result<Algorithms, String> {
    Algorithms::new(items(text)).map_err(|position| {
        format!("has an entry that is no asymmetric algorithm of ours (number {})", position + 1)
    })
}

/// Scopes as RFC 6749 section 3.3 spells them; they stand in a quoted part of a header.
fn scopes(text: &str) -> Result<Vec<String>, String> {
    let scopes: Vec<String> = text.split_ascii_whitespace().map(str::to_owned).collect();
    let is_scope = |b: u8| b.is_ascii_graphic() && b != b'"' && b != b'\\';
    if scopes.is_empty() || !scopes.iter().all(|scope| scope.bytes().all(is_scope)) {
        return Err("is no list of scopes".into());
    }
    // MCP authorization, "Refresh Tokens": it is nothing that a resource requires.
    if scopes.iter().any(|scope| scope == "offline_access") {
        return Err("requires `offline_access`, which concerns the issuer alone".into());
    }
    Ok(scopes)
}

fn workspace(text: &str) -> Result<WorkspaceId, String> {
    text.parse().map_err(|_| "is no workspace id".to_owned())
}

fn claim(text: &str) -> Result<String, String> {
    let named = text.len() <= 256 && text.bytes().all(|b| b.is_ascii_graphic());
    if named { Ok(text.to_owned()) } else { Err("is no name of a claim".into()) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::{Environment, Loaded, Problem};

    const GOOD: [(&str, &str); 3] = [
        ("OBOL_PUBLIC_URL", "https://gw.example.com/"),
        ("OBOL_OAUTH_ISSUERS", "https://a.example, https://b.example/=https://keys.example/b"),
        ("OBOL_OAUTH_WORKSPACE", "acme"),
    ];

    #[test]
    fn oauth_is_off_without_an_issuer_and_complete_with_one() {
        assert!(Loaded::dev(&Environment::default()).unwrap().config.gateway.oauth.is_none());
        let public = Environment::new([("OBOL_PUBLIC_URL", "https://gw.example.com")]);
        assert!(Loaded::dev(&public).unwrap().config.gateway.oauth.is_none());

        let oauth = Loaded::dev(&Environment::new(GOOD)).unwrap().config.gateway.oauth.unwrap();
        assert_eq!(oauth.resource.at("/mcp").as_deref(), Some("https://gw.example.com/mcp"));
        assert_eq!(oauth.resource.issuers(), ["https://a.example", "https://b.example/"]);
        assert_eq!(oauth.claims.workspace, WorkspaceRule::Fixed("acme".parse().unwrap()));
        assert_eq!(oauth.jwks.ttl, Duration::from_secs(300));
        assert_eq!(oauth.algorithms, Algorithms::new(["RS256", "PS256", "ES256", "EdDSA"]).unwrap());
    }

    #[test]
    fn what_is_wrong_is_told_all_at_once() {
        let problems = |vars: &[(&str, &str)]| -> Vec<String> {
            let problems = Loaded::dev(&Environment::new(vars.iter().copied())).unwrap_err();
            problems.iter().map(Problem::to_string).collect()
        };
        let expect = |vars: &[(&str, &str)], expected: &[&str]| {
            let found = problems(vars);
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (problem, expected) in found.iter().zip(expected) {
                assert!(problem.starts_with(expected), "{problem}");
            }
        };
        expect(
            &[("OBOL_OAUTH_ISSUERS", "https://a.example")],
            &["OBOL_PUBLIC_URL: not set, and OBOL_OAUTH_ISSUERS is", "OBOL_OAUTH_WORKSPACE: neither it nor"],
        );
        expect(
            &[("OBOL_OAUTH_SCOPES", "mcp"), ("OBOL_OAUTH_WORKSPACE", "acme")],
            &[
                "OBOL_OAUTH_SCOPES: set without OBOL_OAUTH_ISSUERS",
                "OBOL_OAUTH_WORKSPACE: set without OBOL_OAUTH_ISSUERS",
            ],
        );
        expect(
            &[
                ("OBOL_PUBLIC_URL", "http://gw.example.com"),
                ("OBOL_OAUTH_ISSUERS", "https://a.example,http://b.example"),
                ("OBOL_OAUTH_ALGORITHMS", "RS256, HS256"),
                ("OBOL_OAUTH_SCOPES", "mcp offline_access"),
                ("OBOL_OAUTH_WORKSPACE", "no workspace"),
                ("OBOL_OAUTH_WORKSPACE_CLAIM", "org"),
                ("OBOL_OAUTH_TAGS_CLAIM", "two words"),
                ("OBOL_OAUTH_JWKS_TTL_S", "0"),
            ],
            &[
                "OBOL_PUBLIC_URL: `http://gw.example.com` is not `https`",
                "OBOL_OAUTH_ISSUERS: `https://a.example,http://b.example` has an entry that is not `https`",
                "OBOL_OAUTH_ALGORITHMS: `RS256, HS256` has an entry that is no asymmetric algorithm",
                "OBOL_OAUTH_SCOPES: `mcp offline_access` requires `offline_access`",
                "OBOL_OAUTH_WORKSPACE: `no workspace` is no workspace id",
                "OBOL_OAUTH_WORKSPACE_CLAIM: set together with OBOL_OAUTH_WORKSPACE",
                "OBOL_OAUTH_TAGS_CLAIM: `two words` is no name of a claim",
                "OBOL_OAUTH_JWKS_TTL_S: `0` is too small",
            ],
        );
        let twice = ("OBOL_OAUTH_ISSUERS", "https://a.example,https://a.example");
        expect(
            &[GOOD[0], twice, GOOD[2]],
            &["OBOL_OAUTH_ISSUERS: `https://a.example,https://a.example` has"],
        );
    }
}
