use obol_model::WorkspaceId;
use serde_json::{Map, Value};

use super::{LEEWAY, ProtectedResource, TokenError, TokenFault};
use crate::User;

/// Longest `sub`: OpenID Connect allows 255.
const LONGEST_SUBJECT: usize = 255;
/// Most audiences of ours in one token, and most tags; and the longest of a tag.
const MOST_AUDIENCES: usize = 16;
const MOST_TAGS: usize = 256;
const LONGEST_TAG: usize = 256;

/// Claims of a token whose signature is good.
pub(super) type Claims = Map<String, Value>;

/// What claims mean here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRules {
    /// Which workspace a user belongs to.
    pub workspace: WorkspaceRule,
    /// The claim whose values become tags, such as `groups`; `None` gives no tags.
    pub tags: Option<String>,
}

/// How the workspace of a user is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkspaceRule {
    /// All users belong to this one.
    Fixed(WorkspaceId),
    /// The value of this claim is its id.
    Claim(String),
}

/// What a token says of its user, once its signature is known to be good; `now` is in seconds.
pub(super) fn user(
    claims: &Claims,
    resource: &ProtectedResource,
    rules: &ClaimRules,
    now: i64,
) -> Result<User, TokenError> {
    let text = |name: &str| claims.get(name).and_then(Value::as_str);
    let issuer = text("iss").ok_or(TokenFault::Issuer)?.to_owned();
    let subject = text("sub").filter(|sub| is_subject(sub)).ok_or(TokenFault::Subject)?.to_owned();
    let ends = time(claims, "exp")?.ok_or(TokenFault::NoExpiry)?;
    if is_over(ends, now) {
        return Err(TokenFault::Expired.into());
    }
    for begins in ["nbf", "iat"] {
        if time(claims, begins)?.is_some_and(|begins| begins > now.saturating_add(LEEWAY)) {
            return Err(TokenFault::NotYet.into());
        }
    }
    // RFC 8707 section 2: issued for us, or of no use here.
    let audiences: Vec<String> = strings(claims.get("aud"))
        .ok_or(TokenFault::Audience)?
        .filter(|audience| resource.is_ours(audience))
        .take(MOST_AUDIENCES)
        .map(str::to_owned)
        .collect();
    if audiences.is_empty() {
        return Err(TokenFault::Audience.into());
    }
    let granted = granted(claims);
    if !resource.scopes().iter().all(|required| granted.contains(&required.as_str())) {
        return Err(TokenError::InsufficientScope);
    }
    let workspace_id = match &rules.workspace {
        WorkspaceRule::Fixed(workspace) => workspace.clone(),
        WorkspaceRule::Claim(name) => workspace(claims, name).ok_or(TokenError::NoWorkspace)?,
    };
    let tags = rules.tags.as_ref().map(|name| tags(claims, name)).transpose()?.unwrap_or_default();
    // What lies beyond the calendar never ends before the process does.
    let expires_at = jiff::Timestamp::from_second(ends).unwrap_or(jiff::Timestamp::MAX);
    Ok(User { workspace_id, issuer, subject, tags, expires_at, audiences })
}

/// Whether a token that ends at this second is refused.
pub(super) fn is_over(ends: i64, now: i64) -> bool {
    ends.saturating_add(LEEWAY) <= now
}

fn is_subject(text: &str) -> bool {
    (1..=LONGEST_SUBJECT).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// A `NumericDate` (RFC 7519 section 2), which may have a fraction.
fn time(claims: &Claims, name: &str) -> Result<Option<i64>, TokenFault> {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "saturates, and a fraction of a second does not matter"
    )]
    let seconds = |value: &Value| value.as_i64().or_else(|| value.as_f64().map(|f| f as i64));
    match claims.get(name) {
        None => Ok(None),
        Some(value) => seconds(value).map(Some).ok_or(TokenFault::Malformed),
    }
}

/// A string, or a list of strings.
fn strings(value: Option<&Value>) -> Option<impl Iterator<Item = &str>> {
    let all: Vec<&str> = match value? {
        Value::String(one) => vec![one],
        Value::Array(all) => all.iter().map(Value::as_str).collect::<Option<_>>()?,
        _ => return None,
    };
    Some(all.into_iter())
}

/// `scope` of RFC 9068, and `scp` as some issuers call it; both are words in one string or a list.
fn granted(claims: &Claims) -> Vec<&str> {
    let claimed = ["scope", "scp"].into_iter().filter_map(|name| strings(claims.get(name)));
    claimed.flatten().flat_map(str::split_ascii_whitespace).collect()
}

/// The claim of this name, or the one that a path with dots leads to (`realm_access.roles`). Names of claims may hold dots
/// themselves, as those that are URLs do, so the whole name comes first.
fn find<'a>(claims: &'a Claims, name: &str) -> Option<&'a Value> {
    if let Some(value) = claims.get(name) {
        return Some(value);
    }
    let (first, rest) = name.split_once('.')?;
    find(claims.get(first)?.as_object()?, rest)
}

fn workspace(claims: &Claims, name: &str) -> Option<WorkspaceId> {
    let mut found = strings(find(claims, name))?;
    // With two there is no saying which one is meant.
    let only = found.next().filter(|_| found.next().is_none())?;
    only.parse().ok()
}

/// Fails closed where tags would be incomplete: a policy may forbid by them.
fn tags(claims: &Claims, name: &str) -> Result<Vec<String>, TokenError> {
    // OpenID Connect Core section 5.6.2: the claim exists, and stands elsewhere ("groups overage").
    let elsewhere = claims.get("_claim_names").and_then(Value::as_object);
    if elsewhere.is_some_and(|names| names.contains_key(name)) {
        return Err(TokenError::Tags);
    }
    let Some(value) = find(claims, name) else { return Ok(Vec::new()) };
    let words: Vec<&str> = match value {
        Value::String(words) => words.split_ascii_whitespace().collect(),
        list => strings(Some(list)).ok_or(TokenError::Tags)?.collect(),
    };
    if words.len() > MOST_TAGS || words.iter().any(|tag| tag.len() > LONGEST_TAG) {
        return Err(TokenError::Tags);
    }
    Ok(words.into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NOW: i64 = 1_800_000_000;

    fn rules(workspace: &str, tags: Option<&str>) -> ClaimRules {
        ClaimRules { workspace: WorkspaceRule::Claim(workspace.into()), tags: tags.map(str::to_owned) }
    }

    /// What comes of a good token with these changes; a `null` takes a claim away.
    fn judged(changes: &Value, rules: &ClaimRules) -> Result<User, TokenError> {
        let scopes = vec!["mcp:use".to_owned(), "mcp:list".to_owned()];
        let resource = ProtectedResource::new("https://gw.example.com", Vec::new(), scopes).unwrap();
        let mut claims = json!({
            "iss": "https://idp.example", "sub": "alice", "aud": "https://gw.example.com", "exp": NOW + 60,
            "iat": NOW, "scope": "mcp:list other mcp:use", "ws": "acme",
        });
        for (name, value) in changes.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let mut claims = claims.as_object().unwrap().clone();
        claims.retain(|_, value| !value.is_null());
        user(&claims, &resource, rules, NOW)
    }

    #[test]
    fn times_are_judged_with_thirty_seconds_of_leeway_and_not_one_more() {
        let ok = Ok(());
        let fault = |fault| Err(TokenError::Invalid(fault));
        for (changes, expected) in [
            (json!({"exp": NOW - 29}), ok),
            (json!({"exp": NOW - 30}), fault(TokenFault::Expired)),
            (json!({"exp": 1_799_999_971.5}), ok),
            (json!({"exp": 1e300}), ok),
            (json!({"exp": -1e300}), fault(TokenFault::Expired)),
            (json!({"exp": u64::MAX}), ok),
            (json!({"exp": i64::MIN}), fault(TokenFault::Expired)),
            (json!({"exp": "2030"}), fault(TokenFault::Malformed)),
            (json!({"exp": null}), fault(TokenFault::NoExpiry)),
            (json!({"nbf": NOW + 30}), ok),
            (json!({"nbf": NOW + 31}), fault(TokenFault::NotYet)),
            (json!({"iat": NOW + 30}), ok),
            (json!({"iat": NOW + 31}), fault(TokenFault::NotYet)),
            (json!({"iat": null}), ok),
            (json!({"nbf": "now"}), fault(TokenFault::Malformed)),
        ] {
            assert_eq!(judged(&changes, &rules("ws", None)).map(drop), expected, "{changes}");
        }
    }

    #[test]
    fn audience_subject_and_scopes_are_required() {
        let ok = Ok(());
        let fault = |fault| Err(TokenError::Invalid(fault));
        for (changes, expected) in [
            (json!({"aud": ["https://other.example", "https://gw.example.com/mcp"]}), ok),
            (json!({"aud": "https://other.example"}), fault(TokenFault::Audience)),
            (json!({"aud": ["https://other.example"]}), fault(TokenFault::Audience)),
            (json!({"aud": []}), fault(TokenFault::Audience)),
            (json!({"aud": ["https://gw.example.com", 7]}), fault(TokenFault::Audience)),
            (json!({"aud": null}), fault(TokenFault::Audience)),
            (json!({"sub": null}), fault(TokenFault::Subject)),
            (json!({"sub": ""}), fault(TokenFault::Subject)),
            (json!({"sub": "a\nb"}), fault(TokenFault::Subject)),
            (json!({"sub": "a".repeat(256)}), fault(TokenFault::Subject)),
            (json!({"sub": 7}), fault(TokenFault::Subject)),
            (json!({"scope": "mcp:use"}), Err(TokenError::InsufficientScope)),
            (json!({"scope": null}), Err(TokenError::InsufficientScope)),
            (json!({"scope": null, "scp": ["mcp:use", "mcp:list"]}), ok),
            (json!({"scope": null, "scp": "mcp:use mcp:list"}), ok),
            (json!({"scope": "mcp:use mcp:listing"}), Err(TokenError::InsufficientScope)),
        ] {
            assert_eq!(judged(&changes, &rules("ws", None)).map(drop), expected, "{changes}");
        }
    }

    #[test]
    fn the_workspace_is_one_or_none() {
        let at = |rule: &str, changes: Value| {
            judged(&changes, &rules(rule, None)).map(|user| user.workspace_id.to_string())
        };
        assert_eq!(at("ws", json!({})), Ok("acme".into()));
        assert_eq!(at("ws", json!({"ws": ["globex"]})), Ok("globex".into()));
        assert_eq!(at("org.id", json!({"org": {"id": "acme"}})), Ok("acme".into()));
        assert_eq!(at("https://x.example/ws", json!({"https://x.example/ws": "acme"})), Ok("acme".into()));
        for (rule, changes) in [
            ("ws", json!({"ws": null})),
            ("ws", json!({"ws": ["acme", "globex"]})),
            ("ws", json!({"ws": []})),
            ("ws", json!({"ws": "no workspace id"})),
            ("ws", json!({"ws": 7})),
            ("org.id", json!({"org": "acme"})),
            ("org.id", json!({})),
        ] {
            assert_eq!(at(rule, changes.clone()), Err(TokenError::NoWorkspace), "{rule} {changes}");
        }
    }

    #[test]
    fn tags_are_complete_or_refused() {
        let at =
            |rule: &str, changes: Value| judged(&changes, &rules("ws", Some(rule))).map(|user| user.tags);
        let two = Ok(vec!["dev".to_owned(), "ops".to_owned()]);
        assert_eq!(at("groups", json!({"groups": ["dev", "ops"]})), two);
        assert_eq!(at("groups", json!({"groups": "dev ops"})), two);
        assert_eq!(at("realm_access.roles", json!({"realm_access": {"roles": ["dev", "ops"]}})), two);
        assert_eq!(at("groups", json!({})), Ok(Vec::new()));
        for changes in [
            json!({"groups": ["dev", 7]}),
            json!({"groups": 7}),
            json!({"groups": vec!["g"; 257]}),
            json!({"groups": ["g".repeat(257)]}),
            json!({"_claim_names": {"groups": "src1"}}),
        ] {
            assert_eq!(at("groups", changes.clone()), Err(TokenError::Tags), "{changes}");
        }
    }
}
