//! The tokenizer, rebuilt from the vocabulary and merges in the GGUF: digits apart, then byte-level BPE.

use crate::Result;
use crate::gguf::{Gguf, Value};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

/// What llama.cpp calls the split of this model, and the type of tokens that no text makes.
const SPLIT: &str = "smollm";
const CONTROL: i64 = 3;

/// Text to tokens and back.
pub struct Text {
    tokenizer: Tokenizer,
    /// Tokens that end an answer.
    pub ends: Vec<u32>,
}

impl Text {
    /// Builds the tokenizer of a model file.
    pub fn new(gguf: &Gguf) -> Result<Text> {
        let split = gguf.text("tokenizer.ggml.pre")?;
        if split != SPLIT {
            return Err(format!("the tokenizer's split is {split:?}, this example knows {SPLIT:?}").into());
        }
        let tokens = gguf.list("tokenizer.ggml.tokens", Value::text)?;
        let kinds = gguf.list("tokenizer.ggml.token_type", Value::integer)?;
        let vocab = tokens.iter().zip(0u32..).map(|(token, id)| (token.to_string(), id)).collect();
        let merges = gguf.list("tokenizer.ggml.merges", Value::text)?.into_iter().map(|merge| {
            let (left, right) = merge.split_once(' ').ok_or_else(|| format!("merge {merge:?}"))?;
            Ok((left.to_string(), right.to_string()))
        });
        let merges = merges.collect::<Result<Vec<_>>>()?;
        let bpe = BPE::builder().vocab_and_merges::<tokenizers::models::bpe::Vocab>(vocab, merges).build();
        let mut tokenizer = Tokenizer::new(bpe.map_err(|e| e.to_string())?);
        let bytes = ByteLevel::new(false, false, true);
        tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![Digits::new(true).into(), bytes.into()])));
        tokenizer.with_decoder(Some(bytes));
        let control = tokens.iter().zip(&kinds).filter(|(_, kind)| **kind == CONTROL);
        let control: Vec<_> = control.map(|(token, _)| AddedToken::from(token.to_string(), true)).collect();
        tokenizer.add_special_tokens(control).map_err(|e| e.to_string())?;
        let ends = ["<|im_end|>", "<|endoftext|>"].iter().filter_map(|t| tokenizer.token_to_id(t)).collect();
        Ok(Text { tokenizer, ends })
    }

    /// Tokens of a text; no special token is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_fast(text, false).map_err(|e| e.to_string())?.get_ids().to_vec())
    }

    /// Text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.tokenizer.decode(tokens, true).map_err(|e| e.to_string())?)
    }

    /// Tokens of a question in the model's chat form, up to where the answer begins.
    pub fn question(&self, prompt: &str) -> Result<Vec<u32>> {
        let system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
        self.encode(&format!(
            "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ))
    }
}
