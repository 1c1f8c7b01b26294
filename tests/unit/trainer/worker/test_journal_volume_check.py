from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.errors import VolumeUnsuitable
from tinsmith_trainer.worker.volume import check_file_system, file_system_of, is_unsuitable

POD = r"""
1021 874 0:151 / / ro,relatime master:301 - overlay overlay rw,lowerdir=/var/lib/containerd/1/fs
1022 1021 0:154 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1031 1021 259:4 /var/lib/kubelet/pods/8f/volumes/empty-dir/tmp /tmp rw,relatime - ext4 /dev/nvme0n1p1 rw
1032 1021 259:9 / /var/lib/tinsmith/journal rw,relatime shared:12 - ext4 /dev/nvme1n1 rw
1033 1021 0:160 / /var/lib/tinsmith/checkpoints rw,relatime - nfs4 10.0.0.4:/export rw,vers=4.1,hard
1034 1021 0:161 / /models rw,relatime - fuse.s3fs s3fs rw,user_id=0
1035 1021 0:162 / /mnt/my\040share rw,relatime - cifs //files/share rw
1036 1021 0:163 / /mnt/over rw,relatime - ext4 /dev/sdb rw
1037 1036 0:164 / /mnt/over rw,relatime - nfs 10.0.0.4:/over rw
""".lstrip()


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        pytest.param("/var/lib/tinsmith/journal/worker", "ext4", id="block-storage"),
        pytest.param("/var/lib/tinsmith/checkpoints", "nfs4", id="the-mount-point-itself"),
        pytest.param("/models/qwen/deep/down", "fuse.s3fs", id="far-below"),
        pytest.param("/var/lib/tinsmith/journalled", "overlay", id="a-name-that-only-begins-like-a-mount"),
        pytest.param("/mnt/my share/x", "cifs", id="escaped-space"),
        pytest.param("/mnt/over/x", "nfs", id="the-later-of-two-mounts-on-one-point"),
    ],
)
def test_a_directory_is_on_the_deepest_mount_above_it(directory: str, kind: str) -> None:
    assert file_system_of(Path(directory), POD) == kind


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuse.sshfs", "fuseblk"])
def test_file_systems_without_a_disks_promises_are_unsuitable(kind: str) -> None:
    assert is_unsuitable(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "apfs"])
def test_a_developers_disk_and_block_storage_are_suitable(kind: str) -> None:
    assert not is_unsuitable(kind)


def test_the_refusal_names_the_volume_and_says_where_to_put_it(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {tmp_path} rw - nfs4 host:/x rw\n")
    with pytest.raises(VolumeUnsuitable, match=r"volume .* is on nfs4.*Put it on block storage"):
        check_file_system(tmp_path / "volume", mountinfo)


def test_nothing_is_checked_if_the_kernel_lists_no_mounts(tmp_path: Path) -> None:
    check_file_system(tmp_path, tmp_path / "absent")
