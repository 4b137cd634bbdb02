//! OAuth 2.1 resource server (DESIGN §8.3): access tokens that are JWTs of configured issuers.
//!
//! What a token may say is fixed beforehand: its issuer is one of the configured ones, its algorithm is one that the
//! issuer's own key allows, its audience is [`ProtectedResource`]. Nothing is ever fetched from an address that a token
//! names; the keys of an issuer are found from its configured URL.

mod claims;
mod error;
mod fetch;
mod issuer;
mod jwks;
mod resource;
mod tokens;

pub use claims::{ClaimRules, WorkspaceRule};
pub use error::{TokenError, TokenFault};
pub use issuer::{Issuer, JwksOptions};
pub use jwks::Algorithms;
pub use resource::{ParsePublicUrlError, ProtectedResource, Target};
pub use tokens::{AccessTokens, OAuthOptions};

/// How far the clocks of an issuer and of a replica may differ, in seconds.
pub const LEEWAY: i64 = 30;
