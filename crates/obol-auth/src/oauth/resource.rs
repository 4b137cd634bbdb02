use obol_model::ConnectionName;
use url::Url;

/// Where RFC 9728 puts the metadata of a resource: between its host and its path.
const WELL_KNOWN: &str = "/.well-known/oauth-protected-resource";

/// What this gateway is to OAuth (RFC 9728): its canonical URIs, who issues tokens for it, and what they must grant.
///
/// With the public URL `https://gw.example.com` the resources are `https://gw.example.com` (everything), and within it
/// `https://gw.example.com/mcp` and `https://gw.example.com/mcp/CONNECTION`: a token whose audience is one of them opens
/// that one and what lies below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtectedResource {
    /// Scheme, host and port.
    origin: String,
    /// Path of the gateway, empty at the root; no slash at the end.
    prefix: String,
    /// The public URL is that of `/mcp` itself: only MCP is a resource.
    mcp_only: bool,
    issuers: Vec<String>,
    scopes: Vec<String>,
}

/// What a request wants to reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target<'a> {
    /// `/mcp`.
    Mcp,
    /// `/mcp/{connection}`, whether it exists or not.
    Connection(&'a ConnectionName),
    /// `/v1`.
    Llm,
}

/// Why a URL cannot be that of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParsePublicUrlError {
    /// It is no absolute URL.
    #[error("is no absolute URL")]
    NotAUrl,
    /// Tokens would travel in clear text.
    #[error("is not `https` (plain `http` is for loopback hosts only)")]
    NotHttps,
    /// RFC 8707 section 2: a resource has no fragment, and should have no query.
    #[error("has a user name, a query or a fragment")]
    NotCanonical,
}

/// Whether a URL is `https`, or `http` on this machine.
pub(super) fn is_protected(url: &Url) -> bool {
    url.scheme() == "https"
        || url.scheme() == "http"
            && match url.host() {
                Some(url::Host::Domain(name)) => name == "localhost",
                Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
                Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
                None => false,
            }
}

impl ProtectedResource {
    /// The resource at a public URL; a slash at its end has no meaning.
    ///
    /// # Errors
    /// When the URL is none that clients could reach safely, or not canonical (MCP authorization, "Canonical Server
    /// URI").
    pub fn new(
        public_url: &str,
        issuers: Vec<String>,
        scopes: Vec<String>,
    ) -> Result<Self, ParsePublicUrlError> {
        let url = Url::parse(public_url).map_err(|_| ParsePublicUrlError::NotAUrl)?;
        if !is_protected(&url) {
            return Err(ParsePublicUrlError::NotHttps);
        }
        let plain = url.username().is_empty() && url.password().is_none();
        if !plain || url.query().is_some() || url.fragment().is_some() {
            return Err(ParsePublicUrlError::NotCanonical);
        }
        let path = url.path().trim_end_matches('/');
        let (prefix, mcp_only) = match path.strip_suffix("/mcp") {
            Some(prefix) => (prefix, true),
            None => (path, false),
        };
        let origin = url.origin().ascii_serialization();
        Ok(Self { origin, prefix: prefix.to_owned(), mcp_only, issuers, scopes })
    }

    /// Who issues tokens for it.
    pub fn issuers(&self) -> &[String] {
        &self.issuers
    }

    /// What a token must grant.
    pub fn scopes(&self) -> &[String] {
        &self.scopes
    }

    /// The resource whose metadata stands at `/.well-known/oauth-protected-resource` + `path` (RFC 9728 section 3.1),
    /// with and without the gateway's own path, which a proxy may take away.
    pub fn at(&self, path: &str) -> Option<String> {
        let path = path.trim_end_matches('/');
        let path = match path.strip_prefix(&self.prefix) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => rest,
            _ => path,
        };
        match path.strip_prefix("/mcp") {
            None if path.is_empty() => Some(self.id(&self.root())),
            Some("") => Some(self.id(&self.path(Target::Mcp))),
            Some(rest) => {
                let name: ConnectionName = rest.strip_prefix('/')?.parse().ok()?;
                Some(self.id(&self.path(Target::Connection(&name))))
            }
            None => None,
        }
    }

    /// Where clients find the metadata of what they wanted to reach.
    pub fn metadata_url(&self, target: Target<'_>) -> String {
        let path = match target {
            // All of the gateway: there is no resource of the LLM surface alone.
            Target::Llm => self.root(),
            target => self.path(target),
        };
        format!("{}{WELL_KNOWN}{path}", self.origin)
    }

    /// Whether an audience is one of this gateway's, whatever it opens.
    pub(super) fn is_ours(&self, audience: &str) -> bool {
        self.path_of(audience).is_some_and(|path| lies_in(path, &self.root()))
    }

    /// Whether a token for `audience` opens `target`.
    pub(super) fn opens(&self, audience: &str, target: Target<'_>) -> bool {
        self.is_ours(audience) && self.path_of(audience).is_some_and(|path| lies_in(&self.path(target), path))
    }

    fn id(&self, path: &str) -> String {
        format!("{}{path}", self.origin)
    }

    /// The path of the widest resource.
    fn root(&self) -> String {
        if self.mcp_only { self.path(Target::Mcp) } else { self.prefix.clone() }
    }

    fn path(&self, target: Target<'_>) -> String {
        match target {
            Target::Mcp => format!("{}/mcp", self.prefix),
            Target::Connection(name) => format!("{}/mcp/{name}", self.prefix),
            Target::Llm => format!("{}/v1", self.prefix),
        }
    }

    /// The path of a URI on this origin, without a slash at its end. Clients spell scheme and host in any case ("Canonical
    /// Server URI"), and both spellings of the end occur.
    fn path_of<'a>(&self, uri: &'a str) -> Option<&'a str> {
        let (origin, path) = uri.split_at_checked(self.origin.len())?;
        let path = path.strip_suffix('/').unwrap_or(path);
        (origin.eq_ignore_ascii_case(&self.origin) && (path.is_empty() || path.starts_with('/')))
            .then_some(path)
    }
}

fn lies_in(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(url: &str) -> ProtectedResource {
        ProtectedResource::new(url, Vec::new(), Vec::new()).unwrap()
    }

    #[test]
    fn an_audience_opens_itself_and_what_lies_below() {
        let (git, chat): (ConnectionName, ConnectionName) = ("git".parse().unwrap(), "chat".parse().unwrap());
        let targets = [Target::Mcp, Target::Connection(&git), Target::Connection(&chat), Target::Llm];
        let nothing = [false; 4];
        for (url, audience, opened) in [
            ("https://gw.example.com", "https://gw.example.com", [true; 4]),
            ("https://gw.example.com/", "https://gw.example.com/", [true; 4]),
            ("https://gw.example.com", "HTTPS://GW.example.com/", [true; 4]),
            ("https://gw.example.com:443", "https://gw.example.com", [true; 4]),
            ("https://gw.example.com", "https://gw.example.com/mcp", [true, true, true, false]),
            ("https://gw.example.com", "https://gw.example.com/mcp/", [true, true, true, false]),
            ("https://gw.example.com", "https://gw.example.com/mcp/git", [false, true, false, false]),
            ("https://gw.example.com", "https://gw.example.com/v1", [false, false, false, true]),
            ("https://gw.example.com", "https://gw.example.com/MCP", nothing),
            ("https://gw.example.com", "https://gw.example.com//", nothing),
            ("https://gw.example.com", "https://gw.example.com.evil.example", nothing),
            ("https://gw.example.com", "https://gw.example.com:8443", nothing),
            ("https://gw.example.com", "https://gw.example.com#", nothing),
            ("https://gw.example.com", "https://gw.example.com?", nothing),
            ("https://gw.example.com", "http://gw.example.com", nothing),
            ("https://gw.example.com", "https://gw.example.co", nothing),
            ("https://gw.example.com", "", nothing),
            ("https://a.example/obol", "https://a.example/obol", [true; 4]),
            ("https://a.example/obol", "https://a.example", nothing),
            ("https://a.example/obol", "https://a.example/obolus", nothing),
            ("https://a.example/obol", "https://a.example/obol/mcp", [true, true, true, false]),
            ("https://a.example/mcp", "https://a.example/mcp", [true, true, true, false]),
            ("https://a.example/mcp", "https://a.example", nothing),
            ("https://a.example/mcp", "https://a.example/v1", nothing),
        ] {
            let resource = resource(url);
            assert_eq!(targets.map(|t| resource.opens(audience, t)), opened, "{url} {audience}");
        }
    }

    #[test]
    fn metadata_stands_where_rfc_9728_puts_it() {
        let git: ConnectionName = "git".parse().unwrap();
        for (url, target, metadata) in [
            ("https://g.example", Target::Mcp, "https://g.example/.well-known/oauth-protected-resource/mcp"),
            (
                "https://g.example/",
                Target::Connection(&git),
                "https://g.example/.well-known/oauth-protected-resource/mcp/git",
            ),
            ("https://g.example", Target::Llm, "https://g.example/.well-known/oauth-protected-resource"),
            (
                "https://g.example/a",
                Target::Mcp,
                "https://g.example/.well-known/oauth-protected-resource/a/mcp",
            ),
            (
                "https://g.example/mcp",
                Target::Llm,
                "https://g.example/.well-known/oauth-protected-resource/mcp",
            ),
        ] {
            assert_eq!(resource(url).metadata_url(target), metadata, "{url}");
        }
        for (url, path, found) in [
            ("https://g.example", "", Some("https://g.example")),
            ("https://g.example", "/", Some("https://g.example")),
            ("https://g.example", "/mcp", Some("https://g.example/mcp")),
            ("https://g.example", "/mcp/git", Some("https://g.example/mcp/git")),
            ("https://g.example", "/mcp/Not a name", None),
            ("https://g.example", "/mcpx", None),
            ("https://g.example", "/v1", None),
            ("https://g.example", "/other", None),
            ("https://g.example/a", "/a/mcp", Some("https://g.example/a/mcp")),
            ("https://g.example/a", "/mcp", Some("https://g.example/a/mcp")),
            ("https://g.example/a", "", Some("https://g.example/a")),
            ("https://g.example/mcp", "", Some("https://g.example/mcp")),
            ("https://g.example/mcp", "/mcp", Some("https://g.example/mcp")),
        ] {
            assert_eq!(resource(url).at(path).as_deref(), found, "{url} {path}");
        }
    }

    #[test]
    fn urls_that_are_no_resource_are_refused() {
        for (url, why) in [
            ("gw.example.com", ParsePublicUrlError::NotAUrl),
            ("/mcp", ParsePublicUrlError::NotAUrl),
            ("http://gw.example.com", ParsePublicUrlError::NotHttps),
            ("ftp://localhost", ParsePublicUrlError::NotHttps),
            ("https://gw.example.com/#f", ParsePublicUrlError::NotCanonical),
            ("https://gw.example.com/?q", ParsePublicUrlError::NotCanonical),
            ("https://me@gw.example.com", ParsePublicUrlError::NotCanonical),
        ] {
            assert_eq!(ProtectedResource::new(url, Vec::new(), Vec::new()), Err(why), "{url}");
        }
        for url in ["http://localhost:8080", "http://127.0.0.1:1/mcp", "http://[::1]:1"] {
            resource(url);
        }
    }
}
