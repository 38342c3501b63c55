//! A ConfigMap or Secret volume as the kubelet writes it.

use super::prelude::*;
use std::os::unix::fs::symlink;
use std::sync::atomic::AtomicU32;

/// A timestamped directory holds the files, `..data` points to it, and each file is a link through
/// `..data`. An update renames a new `..data` link over the old one and removes the old directory.
pub struct SecretVolume {
    dir: TempDir,
    update_count: AtomicU32,
}

impl SecretVolume {
    /// Writes files with these names and contents.
    pub fn mount(files: &[(&str, impl AsRef<str>)]) -> Self {
        let volume = Self {
            dir: TempDir::new().unwrap(),
            update_count: AtomicU32::new(0),
        };
        volume.swap(files);
        for (name, _) in files {
            symlink(format!("..data/{name}"), volume.path(name)).unwrap();
        }
        volume
    }

    /// Replaces all files at once.
    pub fn swap(&self, files: &[(&str, impl AsRef<str>)]) {
        let number = self.update_count.fetch_add(1, Ordering::Relaxed);
        let stamp = format!("..2026_11_20_10_00_00.{number}");
        let old = fs::read_link(self.path("..data"));
        fs::create_dir(self.path(&stamp)).unwrap();
        for (name, content) in files {
            fs::write(self.path(&stamp).join(name), content.as_ref()).unwrap();
        }
        symlink(&stamp, self.path("..data_tmp")).unwrap();
        fs::rename(self.path("..data_tmp"), self.path("..data")).unwrap();
        if let Ok(old) = old {
            fs::remove_dir_all(self.dir.path().join(old)).unwrap();
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}
