//! The engine's tokenizer: one token per four bytes of UTF-8, so that anybody can predict a count.
//!
//! `count = ceil(bytes / 4)`; a token id is its bytes as a little-endian `u32`, zero-padded at the end of the text.
//! Chats are rendered as `<|im_start|>{role}\n{content}<|im_end|>\n` per message, then `<|im_start|>assistant\n`.

use serde::Deserialize;

/// Bytes of text that one token stands for.
pub const BYTES_PER_TOKEN: usize = 4;

/// Words of exactly one token each, so that generated text and generated tokens agree in length.
const WORDS: [&str; 32] = [
    " air", " ash", " bay", " bee", " cup", " day", " dew", " elm", " fen", " fig", " fox", " hay", " ice",
    " ivy", " jay", " key", " log", " map", " nut", " oak", " owl", " pea", " rye", " sea", " sky", " sun",
    " tea", " urn", " vow", " wax", " yew", " zoo",
];

/// Tokens of a text.
pub fn encode(text: &str) -> Vec<u32> {
    text.as_bytes()
        .chunks(BYTES_PER_TOKEN)
        .map(|chunk| {
            let mut word = [0_u8; BYTES_PER_TOKEN];
            word[..chunk.len()].copy_from_slice(chunk);
            u32::from_le_bytes(word)
        })
        .collect()
}

/// Text of one token. Bytes that are no UTF-8 by themselves become U+FFFD, padding disappears.
pub fn decode(token: u32) -> String {
    let bytes = token.to_le_bytes();
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// The token generated at `index` of an answer whose prompt hashes to `seed`.
pub fn generated(seed: u64, index: u32) -> u32 {
    let word = xxhash_rust::xxh3::xxh3_64_with_seed(&index.to_le_bytes(), seed) % WORDS.len() as u64;
    let mut bytes = [0_u8; BYTES_PER_TOKEN];
    bytes.copy_from_slice(WORDS[word as usize].as_bytes());
    u32::from_le_bytes(bytes)
}

/// One message of a chat.
#[derive(Deserialize)]
pub struct Message {
    /// Speaker, `user` when absent.
    #[serde(default)]
    pub role: Option<String>,
    /// What is said.
    #[serde(default)]
    pub content: Option<Content>,
}

/// Content of a message: plain text or parts.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// One text.
    Text(String),
    /// Parts, of which those with text are joined with a newline.
    Parts(Vec<Part>),
}

/// One part of a message's content.
#[derive(Deserialize)]
pub struct Part {
    /// The text, absent for images and other media.
    #[serde(default)]
    pub text: Option<String>,
}

impl Content {
    /// The content as one text.
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        match self {
            Self::Text(text) => text.as_str().into(),
            Self::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part.text.as_deref()).collect();
                texts.join("\n").into()
            }
        }
    }
}

/// How a chat ends once rendered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ChatEnding {
    /// With the opening of an assistant's turn.
    GenerationPrompt,
    /// With the last message closed.
    Closed,
    /// With the last message left open, to be continued.
    OpenLastMessage,
}

/// A chat as the text that the model would see.
pub fn render_chat(messages: &[Message], ending: ChatEnding) -> String {
    let mut text = String::new();
    for message in messages {
        text.push_str("<|im_start|>");
        text.push_str(message.role.as_deref().unwrap_or("user"));
        text.push('\n');
        if let Some(content) = &message.content {
            text.push_str(&content.text());
        }
        text.push_str("<|im_end|>\n");
    }
    match ending {
        ChatEnding::GenerationPrompt => text.push_str("<|im_start|>assistant\n"),
        ChatEnding::Closed => {}
        ChatEnding::OpenLastMessage => text.truncate(text.len().saturating_sub("<|im_end|>\n".len())),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("", 0)]
    #[case("a", 1)]
    #[case("abcd", 1)]
    #[case("abcde", 2)]
    #[case("żółw", 2)]
    fn counts_are_bytes_over_four_rounded_up(#[case] text: &str, #[case] count: usize) {
        assert_eq!(encode(text).len(), count);
    }

    #[test]
    fn ascii_text_survives_a_round_trip() {
        let text = "The quick brown fox.";
        let decoded: String = encode(text).into_iter().map(decode).collect();
        assert_eq!(decoded, text);
    }

    #[test]
    fn a_generated_word_is_one_token_and_depends_on_seed_and_index_only() {
        for index in 0..64 {
            let token = generated(7, index);
            assert_eq!(encode(&decode(token)), [token]);
            assert_eq!(generated(7, index), token);
        }
        assert_ne!(
            (0..8).map(|i| generated(7, i)).collect::<Vec<_>>(),
            (0..8).map(|i| generated(8, i)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_chat_renders_with_its_parts_joined_by_newlines() {
        let messages: Vec<Message> = serde_json::from_str(
            r#"[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]}]"#,
        )
        .unwrap();
        let base = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\none\ntwo";
        assert_eq!(
            render_chat(&messages, ChatEnding::GenerationPrompt),
            format!("{base}<|im_end|>\n<|im_start|>assistant\n")
        );
        assert_eq!(render_chat(&messages, ChatEnding::Closed), format!("{base}<|im_end|>\n"));
        assert_eq!(render_chat(&messages, ChatEnding::OpenLastMessage), base);
    }
}
